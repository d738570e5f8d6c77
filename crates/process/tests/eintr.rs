//! signal(7) lists calls that the kernel ends with EINTR after a stop, although there is no signal
//! handler. No program sees that of a checkpoint, neither where it goes on nor where it comes back.

mod support;

use kedge_process::{Options, Roots, checkpoint};
use std::process::Command;
use support::survive::{as_an_ordinary_user, continues, remove_left_behind};
use support::{Folder, Running, alone, bring_back, build};

const STEPS: usize = 40;
/// Checkpoints after which the job goes on.
const CHECKPOINTS: usize = 5;

fn never_ends_early(call: &str) {
    let _alone = alone();
    let folder = Folder::new(&format!("eintr-{call}"));
    let program = build(&folder, "eintr.c", &["-pthread"]);
    let mut running = Running::start(Command::new(&program).args([call, &STEPS.to_string()]));
    let roots = Roots::These(vec![running.child.id() as i32]);
    let mut before = running.lines(1);
    for round in 0..CHECKPOINTS {
        before.extend(running.lines(1));
        let image = folder.path(&format!("image-{round}"));
        std::fs::create_dir(&image).unwrap();
        // Its memory need not be written.
        drop(checkpoint(&roots, Options::new(image)).unwrap());
    }
    before.extend(running.lines(2));
    let wrong = before.iter().find(|line| line.starts_with("wrong"));
    assert!(wrong.is_none(), "{wrong:?}");
    let image = folder.path("image");
    running.capture_and_kill(&image);
    remove_left_behind();
    let (after, status) = bring_back(&image);
    continues(&before, &after, STEPS);
    assert_eq!(libc::WEXITSTATUS(status), 7, "status {status:#x}");
}

macro_rules! calls {
    ($($call:ident)*) => {$(
        #[test]
        fn $call() {
            never_ends_early(stringify!($call));
        }
    )*};
}

calls! {
    accept accept4 connect read readv recv recvmsg recvmmsg write writev send sendmsg sendmmsg
    epoll_wait epoll_pwait semop semtimedop sigtimedwait sigwaitinfo msgrcv msgsnd
}

#[test]
fn ordinary_users_see_none_either() {
    as_an_ordinary_user();
}
