//! Of the relay.

use super::*;
use crate::Session;
use std::mem;

const ANSWER: &[u8] = b"cmd=fullinit-response;rc=0;rank=1;size=2;appnum=-1;";

fn relay() -> Relay {
    Relay::new(Session::begun(ANSWER.to_vec()).unwrap(), "7.0".to_owned())
}

fn taken(bytes: &mut Vec<u8>) -> String {
    String::from_utf8(mem::take(bytes)).unwrap()
}

fn framed(body: &str) -> Vec<u8> {
    frame(body.as_bytes()).unwrap()
}

/// A rank that has been told who it is.
fn begun() -> Relay {
    let mut relay = relay();
    relay.from_rank(b"cmd=init pmi_version=2 pmi_subversion=0\n").unwrap();
    relay.from_rank(&framed("cmd=fullinit;pmijobid=7.0;pmirank=1;")).unwrap();
    relay.to_rank().clear();
    relay
}

#[test]
fn frames_pass_unchanged() {
    let mut relay = relay();
    assert!(!relay.has_begun());
    relay.from_rank(b"cmd=init pmi_version=2 pmi_subv").unwrap();
    assert!(relay.to_rank().is_empty());
    relay.from_rank(b"ersion=0\n").unwrap();
    let said = taken(relay.to_rank());
    assert_eq!(said, "cmd=response_to_init rc=0 pmi_version=2 pmi_subversion=0\n");
    relay.from_rank(&framed("cmd=fullinit;pmijobid=7.0;pmirank=1;threaded=FALSE;")).unwrap();
    assert_eq!(relay.to_rank().split_off(6), ANSWER);
    relay.to_rank().clear();
    // Nothing of that was for the daemon.
    assert!(relay.to_daemon().is_empty());

    let put = framed("cmd=kvs-put;key=a;value=b;;c;unknown=d;");
    relay.from_rank(&put).unwrap();
    assert_eq!(taken(relay.to_daemon()).as_bytes(), put);
    assert_eq!(relay.waits_for(), Some("kvs-put"));
    assert!(relay.saved().is_err());
    let answer = framed("cmd=kvs-put-response;rc=0;unknown=e;");
    relay.from_daemon(&answer[..9]).unwrap();
    relay.from_daemon(&answer[9..]).unwrap();
    assert_eq!(taken(relay.to_rank()).as_bytes(), answer);
    assert_eq!(relay.waits_for(), None);
    assert_eq!(relay.repeats().unwrap(), [put]);

    relay.from_rank(&framed("cmd=finalize;")).unwrap();
    assert!(!relay.has_ended());
    relay.from_daemon(&framed("cmd=finalize-response;rc=0;")).unwrap();
    assert!(relay.has_ended());
}

/// However often it is asked for: the daemon may read nothing any more.
#[test]
fn an_abort_ends_the_session() {
    let mut one = relay();
    one.from_rank(b"cmd=init pmi_version=1 pmi_subversion=1\n").unwrap();
    one.to_rank().clear();
    let abort = framed("cmd=abort;isworld=TRUE;msg=exit code 3;");
    for (mut relay, asks, more) in [
        (begun(), abort.clone(), framed("cmd=kvs-put;key=a;value=b;")),
        (one, b"cmd=abort exitcode=3\n".to_vec(), b"cmd=put kvsname=7.0 key=a value=b\n".to_vec()),
    ] {
        relay.from_rank(&[&*asks, &*asks, &*more].concat()).unwrap();
        assert_eq!((relay.waits_for(), relay.has_ended()), (None, true));
        for _ in 0..MAX_FRAME_LEN / 16 {
            relay.from_rank(&asks).unwrap();
        }
        assert_eq!(*relay.to_daemon(), abort);
        assert!(relay.wants_rank() && relay.from_rank.is_empty() && relay.to_rank().is_empty());
    }
}

#[test]
fn lines_become_frames() {
    let mut relay = relay();
    relay.from_rank(b"cmd=init pmi_version=1 pmi_subversion=1\n").unwrap();
    let said = taken(relay.to_rank());
    assert_eq!(said, "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1\n");
    let own = [
        ("get_maxes", "cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024\n"),
        ("get_appnum", "cmd=appnum rc=0 appnum=-1\n"),
        ("get_my_kvsname", "cmd=my_kvsname rc=0 kvsname=7.0\n"),
    ];
    for (asked, answer) in own {
        relay.from_rank(format!("cmd={asked}\n").as_bytes()).unwrap();
        assert_eq!(taken(relay.to_rank()), answer);
    }
    assert!(relay.to_daemon().is_empty());
    let passed = [
        (
            "get kvsname=7.0 key=PMI_process_mapping",
            "cmd=info-getjobattr;key=PMI_process_mapping;",
            "cmd=info-getjobattr-response;rc=0;found=TRUE;value=(vector,(0,2,1));",
            "cmd=get_result rc=0 value=(vector,(0,2,1))\n",
        ),
        (
            "put kvsname=7.0 key=a value=b;c=%3Bd",
            "cmd=kvs-put;key=a;value=b%3Bc=%253Bd;",
            "cmd=kvs-put-response;rc=0;",
            "cmd=put_result rc=0\n",
        ),
        ("barrier_in", "cmd=kvs-fence;", "cmd=kvs-fence-response;rc=0;", "cmd=barrier_out rc=0\n"),
        (
            "get kvsname=7.0 key=a",
            "cmd=kvs-get;jobid=7.0;srcid=-1;key=a;",
            "cmd=kvs-get-response;rc=0;found=TRUE;value=b%3Bc=%253Bd;",
            "cmd=get_result rc=0 value=b;c=%3Bd\n",
        ),
        (
            "get kvsname=7.0 key=z",
            "cmd=kvs-get;jobid=7.0;srcid=-1;key=z;",
            "cmd=kvs-get-response;rc=0;found=FALSE;",
            "cmd=get_result rc=-1 msg=key_not_found value=unknown\n",
        ),
        (
            "get_universe_size",
            "cmd=info-getjobattr;key=universeSize;",
            "cmd=info-getjobattr-response;rc=0;found=TRUE;value=2;",
            "cmd=universe_size rc=0 size=2\n",
        ),
        ("finalize", "cmd=finalize;", "cmd=finalize-response;rc=0;", "cmd=finalize_ack rc=0\n"),
    ];
    for (line, request, answer, back) in passed {
        relay.from_rank(format!("cmd={line}\n").as_bytes()).unwrap();
        assert_eq!(taken(relay.to_daemon()).split_off(6), request);
        relay.from_daemon(&framed(answer)).unwrap();
        assert_eq!(taken(relay.to_rank()), back);
    }
    assert!(relay.has_ended());
    assert_eq!(relay.repeats().unwrap(), [framed("cmd=kvs-put;key=a;value=b%3Bc=%253Bd;")]);
}

#[test]
fn a_request_is_held_back_and_goes_on_elsewhere() {
    let mut relay = begun();
    let put = framed("cmd=kvs-put;key=a;value=b;");
    relay.from_rank(&put).unwrap();
    relay.hold(true).unwrap();
    let fence = framed("cmd=kvs-fence;");
    relay.from_rank(&fence).unwrap();
    assert_eq!(taken(relay.to_daemon()).as_bytes(), put);
    let answer = framed("cmd=kvs-put-response;rc=0;");
    relay.from_daemon(&answer).unwrap();
    assert!(relay.to_daemon().is_empty());
    let saved = relay.saved().unwrap();

    let rank = Rank { rank: 1, size: 2, application: -1, answer: b"cmd=other;".to_vec() };
    let mut after = Relay::restored(rank, saved).unwrap();
    assert_eq!(after.repeats().unwrap(), [put]);
    assert_eq!(taken(after.to_rank()).as_bytes(), answer);
    after.hold(false).unwrap();
    assert_eq!(taken(after.to_daemon()).as_bytes(), fence);

    // And here, where nothing has happened to the job.
    relay.hold(false).unwrap();
    assert_eq!(taken(relay.to_daemon()).as_bytes(), fence);
}

#[test]
fn a_fence_that_not_all_have_come_to_is_sent_again() {
    let rank = || Rank { rank: 1, size: 2, application: -1, answer: b"cmd=other;".to_vec() };
    let fence = framed("cmd=kvs-fence;");
    let done = framed("cmd=kvs-fence-response;rc=0;");
    let mut two = begun();
    let mut one = relay();
    one.from_rank(b"cmd=init pmi_version=1 pmi_subversion=1\n").unwrap();
    for (relay, asks) in [(&mut two, fence.clone()), (&mut one, b"cmd=barrier_in\n".to_vec())] {
        relay.to_rank().clear();
        relay.from_rank(&asks).unwrap();
        relay.from_daemon(&done).unwrap();
        relay.from_rank(&asks).unwrap();
        relay.hold(true).unwrap();
        relay.from_rank(&asks[..5]).unwrap();
        assert_eq!((relay.fences(), relay.is_in_fence(), relay.waits_for()), (2, true, None));
        let saved = relay.saved().unwrap();
        // The step that goes on answers it.
        relay.from_daemon(&done).unwrap();
        assert!(!relay.is_in_fence());

        let mut after = Relay::restored(rank(), saved).unwrap();
        assert_eq!(after.fences(), 1);
        after.hold(false).unwrap();
        assert_eq!(*after.to_daemon(), fence);
        assert_eq!((after.fences(), after.is_in_fence()), (2, true));
        after.from_daemon(&done).unwrap();
        after.from_rank(&asks[5..]).unwrap();
        assert_eq!(after.fences(), 3);
    }
}

#[test]
fn what_is_no_session_ends_it() {
    let bad = relay().from_rank(b"GET / HTTP/1.1\n");
    assert!(matches!(bad, Err(PmiError::Pair(_))), "{bad:?}");
    let bad = relay().from_rank(b"cmd=init pmi_version=3 pmi_subversion=0\n");
    assert_eq!(bad, Err(PmiError::Version(3, 0)));
    let mut early = relay();
    early.from_rank(b"cmd=init pmi_version=2 pmi_subversion=0\n").unwrap();
    let bad = early.from_rank(&framed("cmd=kvs-fence;"));
    assert_eq!(bad, Err(PmiError::Early("kvs-fence".to_owned())));
    let bad = begun().from_daemon(&framed("cmd=kvs-fence-response;rc=0;"));
    assert_eq!(bad, Err(PmiError::Unasked("kvs-fence-response".to_owned())));
    let mut one = relay();
    one.from_rank(b"cmd=init pmi_version=1 pmi_subversion=1\n").unwrap();
    let bad = one.from_rank(b"mcmd=spawn\n");
    assert_eq!(bad, Err(PmiError::Unsupported("spawn".to_owned())));
}

#[test]
fn what_is_kept_is_bounded() {
    let mut relay = begun();
    for number in 0..=MAX_TOLD {
        relay.from_rank(&framed(&format!("cmd=kvs-put;key=k{number};value=v;"))).unwrap();
        relay.from_daemon(&framed("cmd=kvs-put-response;rc=0;")).unwrap();
        relay.to_rank().clear();
        relay.to_daemon().clear();
    }
    assert_eq!(relay.saved(), Err(PmiError::ToldMuch { most: MAX_TOLD_BYTES }));

    let mut relay = begun();
    let fence = framed("cmd=kvs-fence;");
    relay.from_rank(&fence.repeat(ASKED + 1)).unwrap();
    assert_eq!(relay.to_daemon().len(), fence.len() * ASKED);
    relay.hold(true).unwrap();
    while relay.wants_rank() {
        relay.from_rank(&[b' '; 4096]).unwrap();
    }
    assert!(relay.from_rank.len() < 2 * MAX_FRAME_LEN);
}
