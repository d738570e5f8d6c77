//! What a line of `generated/exports.rs` becomes.

/// An exported function: traces, checks the gate, catches panics and calls the implementation.
///
/// `per_thread` before the symbol: a NULL stream means the calling thread's default stream for the
/// duration of the call ([`entry::default_stream`](crate::entry::default_stream)).
macro_rules! export {
    ($gate:ident, $symbol:ident($($arg:ident: $ty:ty),*) = $($path:ident)::+($($pass:expr),*)) => {
        /// See the CUDA driver API reference; the implementation has the same name.
        ///
        /// # Safety
        /// As the CUDA driver API reference says of the arguments.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol($($arg: $ty),*) -> CUresult {
            let begun = $crate::entry::begin(stringify!($symbol));
            let outcome = $crate::entry::call(
                stringify!($symbol),
                $crate::entry::Gate::$gate,
                // SAFETY: the caller keeps the C API's contract, which is the implementation's.
                || unsafe { $($path)::+($($pass),*) },
            );
            if $crate::entry::tracing() {
                let args: &[(&str, &dyn std::fmt::Debug)] = &[$((stringify!($arg), &$arg)),*];
                $crate::entry::trace(stringify!($symbol), begun, args, outcome);
            }
            outcome
        }
    };
    ($gate:ident per_thread, $symbol:ident($($arg:ident: $ty:ty),*) = $($path:ident)::+($($pass:expr),*)) => {
        /// As its plain namesake, with the calling thread's default stream.
        ///
        /// # Safety
        /// As the CUDA driver API reference says of the arguments.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol($($arg: $ty),*) -> CUresult {
            let begun = $crate::entry::begin(stringify!($symbol));
            let outcome = $crate::entry::call(
                stringify!($symbol),
                $crate::entry::Gate::$gate,
                // SAFETY: the caller keeps the C API's contract, which is the implementation's.
                || $crate::entry::with_per_thread_stream(|| unsafe { $($path)::+($($pass),*) }),
            );
            if $crate::entry::tracing() {
                let args: &[(&str, &dyn std::fmt::Debug)] = &[$((stringify!($arg), &$arg)),*];
                $crate::entry::trace(stringify!($symbol), begun, args, outcome);
            }
            outcome
        }
    };
}

/// An exported function that kedge does not implement: NOT_SUPPORTED, and its name in the log.
macro_rules! unsupported {
    ($symbol:ident($($arg:ident: $ty:ty),*)) => {
        /// Not supported.
        ///
        /// # Safety
        /// Its arguments are not looked at.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol($($arg: $ty),*) -> CUresult {
            $(let _ = $arg;)*
            $crate::entry::unsupported(stringify!($symbol))
        }
    };
}

/// An exported variable of the debugger's interface: zero, for nobody debugs here.
macro_rules! data {
    ($symbol:ident: Path4096) => {
        #[doc(hidden)]
        #[unsafe(no_mangle)]
        pub static $symbol: Path4096 = [const { AtomicU8::new(0) }; 4096];
    };
    ($symbol:ident: $ty:ident) => {
        #[doc(hidden)]
        #[unsafe(no_mangle)]
        pub static $symbol: $ty = $ty::new(0);
    };
}

pub(crate) use {data, export, unsupported};
