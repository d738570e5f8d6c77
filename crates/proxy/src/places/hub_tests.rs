use super::*;
use kedge_protocol::OutputTarget;
use kedge_wire::{Bytes, List};

/// What the client was told.
#[derive(Default)]
struct Client {
    replies: Mutex<Vec<(u32, Vec<u8>)>>,
    completed: Mutex<Vec<u64>>,
    broken: Mutex<Vec<CtxId>>,
    /// Host functions that there is room for.
    room: Mutex<usize>,
    asked: Mutex<Vec<u64>>,
    output: AtomicBool,
}

impl Outlet for Arc<Client> {
    fn reply(&self, to: ReplyTo, bytes: &[u8]) -> Result<(), String> {
        locked(&self.replies).push((to.number(), bytes.to_vec()));
        Ok(())
    }

    fn set_sticky(&self, ctx: CtxId, _: CuError) {
        locked(&self.broken).push(ctx);
    }

    fn clear_sticky(&self, ctx: CtxId) {
        locked(&self.broken).retain(|of| *of != ctx);
    }

    fn wants_reader(&self) -> bool {
        false
    }

    fn set_completed(&self, seq: u64) {
        locked(&self.completed).push(seq);
    }

    fn set_output_pending(&self, pending: bool) {
        self.output.store(pending, Ordering::SeqCst);
    }

    fn try_host_fn(&self, token: u64) -> bool {
        let mut room = locked(&self.room);
        let fits = *room > 0;
        if fits {
            *room -= 1;
            locked(&self.asked).push(token);
        }
        fits
    }

    fn close(&self) {}
}

/// Two places.
fn hub() -> (Arc<Hub>, Arc<Client>, [PlaceOutlet; 2]) {
    let client = Arc::<Client>::default();
    let log = Arc::new(JobLog::none());
    let memory = ClientMemory::new(std::process::id());
    let hub = Hub::start(client.clone(), memory, log.clone(), 2, 0).unwrap();
    let outlet = |at| PlaceOutlet { hub: hub.clone(), at };
    let hosts = (0..2).map(|at| {
        let memory = PlaceMemory { hub: hub.clone(), at };
        Arc::new(ProxyHost::new(outlet(at), memory, log.clone(), None))
    });
    hub.set_hosts(hosts.collect());
    let outlets = [0, 1].map(outlet);
    (hub, client, outlets)
}

fn slot(number: u32) -> ReplyTo {
    ReplyTo::of_number(number).unwrap()
}

fn status(result: Result<(), u32>) -> Vec<u8> {
    let mut bytes = Vec::new();
    kedge_wire::encode::<Status>(&result, &mut bytes);
    bytes
}

#[test]
fn progress_is_that_of_the_place_that_is_behind() {
    let (hub, client, [first, second]) = hub();
    let told = || locked(&client.completed).last().copied();
    // 10 to the first, 11 to both, 12 to the second.
    let numbers = [(0, 10), (0, 11), (1, 11), (1, 12)].map(|(at, seq)| {
        let number = hub.sent(at, seq);
        hub.handed_on(seq);
        number
    });
    assert_eq!(numbers, [1, 2, 1, 2]);
    hub.publish();
    assert_eq!(told(), Some(9));
    second.set_completed(2);
    assert_eq!(told(), Some(9));
    first.set_completed(1);
    assert_eq!(told(), Some(10));
    first.set_completed(2);
    assert_eq!(told(), Some(12));
    // What no place has to do with is complete once it is handed on.
    hub.handed_on(13);
    hub.publish();
    assert_eq!(told(), Some(13));
    // A place that tells of what it was not sent changes nothing.
    first.set_completed(99);
    assert_eq!(told(), Some(13));
}

#[test]
fn all_places_answer_as_one() {
    let (hub, client, [first, second]) = hub();
    let undo = || Some(Message::Post { post: kedge_protocol::Post::Unshare { addr: 1, size: 2 } });
    hub.asks_all(&slot(3), 2, undo());
    first.reply(slot(3), &status(Ok(()))).unwrap();
    assert!(locked(&client.replies).is_empty());
    second.reply(slot(3), &status(Ok(()))).unwrap();
    assert_eq!(locked(&client.replies).pop(), Some((3, status(Ok(())))));
    assert!(hub.to_undo().is_empty());

    hub.asks_all(&slot(3), 2, undo());
    second.reply(slot(3), &status(Err(2))).unwrap();
    first.reply(slot(3), &status(Ok(()))).unwrap();
    assert_eq!(locked(&client.replies).pop(), Some((3, status(Err(2)))));
    assert_eq!(hub.to_undo(), [(0, undo().unwrap())]);

    hub.asks_all(&slot(4), 2, None);
    assert!(first.reply(slot(4), &[1, 2, 3]).is_err(), "a far end that talks nonsense");
    // Others' replies pass as they are.
    first.reply(slot(5), &[1, 2, 3]).unwrap();
    assert_eq!(locked(&client.replies).pop(), Some((5, vec![1, 2, 3])));
}

#[test]
fn what_both_have_printed_is_taken_by_turns() {
    let (hub, client, [first, second]) = hub();
    first.set_output_pending(true);
    second.set_output_pending(true);
    let printed = |more| {
        let part = (OutputTarget::Stdout {}, Bytes::new(b"a".to_vec()).unwrap());
        let mut bytes = Vec::new();
        let output = Output { parts: List::new(vec![part]).unwrap(), more };
        kedge_wire::encode(&output, &mut bytes);
        bytes
    };
    assert_eq!(hub.asks_output(&slot(0)), 0);
    first.set_output_pending(false);
    assert!(client.output.load(Ordering::SeqCst), "the second has some");
    first.reply(slot(0), &printed(false)).unwrap();
    assert_eq!(locked(&client.replies).pop(), Some((0, printed(true))));
    assert_eq!(hub.asks_output(&slot(0)), 1);
    second.set_output_pending(false);
    second.reply(slot(0), &printed(false)).unwrap();
    assert_eq!(locked(&client.replies).pop(), Some((0, printed(false))));
    assert!(!client.output.load(Ordering::SeqCst));
}

#[test]
fn a_place_breaks_its_own_contexts_alone() {
    let (hub, client, [first, second]) = hub();
    hub.context_begins(CtxId(1), 0);
    hub.context_begins(CtxId(2), 1);
    second.set_sticky(CtxId(1), CuError::LAUNCH_FAILED);
    assert!(locked(&client.broken).is_empty());
    first.set_sticky(CtxId(1), CuError::LAUNCH_FAILED);
    second.clear_sticky(CtxId(1));
    assert_eq!(*locked(&client.broken), [CtxId(1)]);
    hub.context_ends(CtxId(1));
    first.clear_sticky(CtxId(1));
    assert!(locked(&client.broken).is_empty());
}

#[test]
fn host_functions_return_to_the_place_that_asked() {
    use kedge_device::Host;
    let (hub, client, _) = hub();
    *locked(&client.room) = 1;
    let (over, ends) = channel();
    for at in [0, 1] {
        let over = over.clone();
        let done = Box::new(move |_| over.send(at).unwrap());
        hub.host(at).unwrap().host_function(7, done);
    }
    assert_eq!(*locked(&client.asked), [7], "there is room for one");
    *locked(&client.room) = 1;
    assert!(hub.heard(Announcement::Returned(7)));
    assert_eq!(ends.recv(), Ok(0));
    assert_eq!(*locked(&client.asked), [7, 7]);
    assert!(hub.heard(Announcement::Returned(7)));
    assert_eq!(ends.recv(), Ok(1));
    assert!(!hub.heard(Announcement::Returned(7)), "nobody has asked for that");
}

#[test]
fn a_gate_opens_once_another_place_has_called() {
    use super::super::gates::Gate;
    use kedge_device::Host;
    let (hub, client, _) = hub();
    let (over, ends) = channel();
    let [held, signal] = {
        let mut gates = hub.gates();
        let [held, signal] = [gates.token(), gates.token()];
        gates.add(held, Gate::closed(0, CtxId(1)));
        gates.add(signal, Gate::signal(1, CtxId(2), held));
        [held, signal]
    };
    let call = |at: At, token| {
        let over = over.clone();
        let done = Box::new(move |_| over.send(at).unwrap());
        hub.host(at).unwrap().host_function(token, done);
    };
    call(0, held);
    assert!(ends.recv_timeout(std::time::Duration::from_millis(50)).is_err());
    call(1, signal);
    let mut both = [ends.recv().unwrap(), ends.recv().unwrap()];
    both.sort_unstable();
    assert_eq!(both, [0, 1]);
    assert!(hub.gates().is_empty() && locked(&client.asked).is_empty());
}
