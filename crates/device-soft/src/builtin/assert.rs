//! Device `assert`.

use super::Call;
use crate::exec::Flow;
use crate::fault::FaultKind;
use kedge_protocol::OutputTarget;

/// `__assertfail(message, file, line, function, charSize)`: prints what CUDA prints for every
/// thread whose assertion failed, and stops the kernel.
pub(super) fn assertfail(call: &mut Call<'_>) -> Result<(), Flow> {
    let mut first = None;
    for lane in call.lanes() {
        let message = text(call, lane, 0)?;
        let file = text(call, lane, 1)?;
        let function = text(call, lane, 3)?;
        let line = call.u32(lane, 2);
        let ([bx, by, bz], [tx, ty, tz]) = (call.block(), call.thread(lane));
        let printed = format!(
            "{file}:{line}: {function}: block: [{bx},{by},{bz}], thread: [{tx},{ty},{tz}] \
             Assertion `{message}` failed.\n"
        );
        call.services().print(OutputTarget::Stderr {}, printed.as_bytes());
        first.get_or_insert((lane, printed));
    }
    match first {
        Some((lane, printed)) => {
            Err(call.fault(lane, FaultKind::Assert, printed.trim_end().into()))
        }
        None => Ok(()),
    }
}

fn text(call: &mut Call<'_>, lane: usize, argument: usize) -> Result<String, Flow> {
    let addr = call.u64(lane, argument);
    Ok(String::from_utf8_lossy(&call.string(lane, addr)?).into_owned())
}
