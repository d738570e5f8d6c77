//! Host functions: the driver calls us when a stream reaches one, and the client runs it.

use crate::driver::{Driver, check};
use kedge_cuda_types::CuError;
use kedge_cuda_types::graph::CUDA_HOST_NODE_PARAMS_v1;
use kedge_cuda_types::handle::CUstream;
use kedge_device::Host;
use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, mpsc};

/// A function of the client's, by its token.
pub(crate) struct HostCall {
    host: Arc<dyn Host>,
    token: u64,
}

impl HostCall {
    pub(crate) fn new(host: &Arc<dyn Host>, token: u64) -> Box<HostCall> {
        Box::new(HostCall { host: Arc::clone(host), token })
    }

    /// Has the client run it; the driver's thread waits, and with it the stream.
    fn make(&self) {
        let (done, over) = mpsc::sync_channel(1);
        self.host.host_function(
            self.token,
            Box::new(move |_| {
                let _ = done.send(());
            }),
        );
        // An error means that nobody will answer: the client has gone.
        let _ = over.recv();
    }

    /// A graph node that makes this call at every launch. The call must outlive the graph.
    pub(crate) fn node_params(&self) -> CUDA_HOST_NODE_PARAMS_v1 {
        CUDA_HOST_NODE_PARAMS_v1 {
            r#fn: Some(repeated),
            userData: ptr::from_ref(self).cast_mut().cast(),
        }
    }
}

/// A graph node that calls nobody.
pub(crate) fn nothing() -> CUDA_HOST_NODE_PARAMS_v1 {
    unsafe extern "C" fn ignore(_: *mut c_void) {}
    CUDA_HOST_NODE_PARAMS_v1 { r#fn: Some(ignore), userData: ptr::null_mut() }
}

/// Appends a call to `stream`.
pub(crate) fn enqueue(
    driver: &Driver,
    call: Box<HostCall>,
    stream: CUstream,
) -> Result<(), CuError> {
    let call = Box::into_raw(call);
    // SAFETY: the driver calls `once` once with the box, or never if the stream breaks.
    let status = check(unsafe { (driver.cuLaunchHostFunc)(stream, Some(once), call.cast()) });
    if status.is_err() {
        // SAFETY: refused, so the box is still ours.
        drop(unsafe { Box::from_raw(call) });
    }
    status
}

unsafe extern "C" fn once(call: *mut c_void) {
    // SAFETY: the box that `enqueue` gave away for this.
    let call = unsafe { Box::from_raw(call.cast::<HostCall>()) };
    call.make();
}

unsafe extern "C" fn repeated(call: *mut c_void) {
    // SAFETY: a call that its graph keeps as long as a launch may run.
    let call = unsafe { &*call.cast::<HostCall>() };
    call.make();
}
