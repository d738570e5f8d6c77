//! Connections of a session's links, as the server hands them over.

use kedge_keys::{Connection, Secrets};
use kedge_remote::{
    Accepted, Connections, HandedOver, Handover, Inlet, Links, Receiver, Refused, Which, write_one,
};
use kedge_socket::{Channel, SocketError};
use kedge_wire::Text;
use std::io;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

/// How much longer than its near end a far end waits for a connection, so that it is never the
/// first to give up.
const LONGER: Duration = Duration::from_secs(30);
/// The longest wait that a near end may ask for.
const LONGEST: Duration = Duration::from_secs(3600);
/// For a near end to take an answer.
const LIMIT: Duration = Duration::from_secs(5);
/// Between two looks at a server that hands nothing over.
const LOOK: Duration = Duration::from_secs(3600);

/// A link's connections, which another thread has it go on with: a reader that carries a message
/// out may itself wait for what the near end has not been asked for yet.
pub(super) struct Handed {
    joined: mpsc::Receiver<()>,
    patience: Duration,
}

/// The links' other side: where connections go that are handed over.
struct Joins {
    inlet: Arc<Inlet>,
    joined: Sender<()>,
    /// Of the newest connection.
    generation: Option<u32>,
}

/// The receiving ends of both links, whose connections a thread hears the server for.
pub(super) struct Received {
    pub(super) line: Receiver<Handed>,
    pub(super) aside: Receiver<Handed>,
}

/// Hears the server on a thread of its own, after `begin`: what the session begins with is older
/// than what the server hands over. `image` gets connections for the bytes of
/// images.
///
/// # Errors
/// The thread cannot be started.
pub(super) fn hear(
    control: Channel,
    links: &Arc<Links>,
    reconnect_ms: u32,
    begin: impl FnOnce(Received) -> io::Result<Receiver<Handed>>,
    image: impl Fn(TcpStream) + Send + 'static,
) -> io::Result<Receiver<Handed>> {
    let patience = Duration::from_millis(reconnect_ms.into()).min(LONGEST) + LONGER;
    let link = |which| {
        let (sender, joined) = mpsc::channel();
        let receiver = Receiver::new(links.clone(), which, Handed { joined, patience });
        let inlet = receiver.inlet().clone();
        (receiver, Joins { inlet, joined: sender, generation: None })
    };
    let ((line, to_line), (aside, to_aside)) = (link(Which::Line), link(Which::Aside));
    let line = begin(Received { line, aside })?;
    let hear = move || hear_all(&control, [to_line, to_aside], image);
    thread::Builder::new().name("handed".into()).stack_size(128 << 10).spawn(hear)?;
    Ok(line)
}

fn hear_all(control: &Channel, mut links: [Joins; 2], image: impl Fn(TcpStream)) {
    loop {
        let ((what, secrets), mut fds) =
            match control.receive::<(HandedOver, Option<Secrets>)>(LOOK) {
                Ok(handed) => handed,
                Err(SocketError::TimedOut { .. }) => continue,
                // Without its server a link that is cut has no other connection.
                Err(_) => return,
            };
        let Some(stream) = fds.pop().map(TcpStream::from) else { continue };
        let hand = match what {
            HandedOver::Link { hand } => hand,
            // The server hands over none that is sealed.
            HandedOver::Image {} => {
                image(stream);
                continue;
            }
        };
        let Some(which) = Which::of_number(hand.link) else { continue };
        // A connection that fails is dialled again.
        let connection = Connection::new(stream, secrets);
        let _ = connection.map(|it| links[which as usize].take(hand, it));
    }
}

impl Joins {
    /// Has the link go on with a connection, if it is newer than those before.
    fn take(&mut self, hand: Handover, mut connection: Connection) -> io::Result<()> {
        connection.stream().set_read_timeout(None)?;
        connection.stream().set_write_timeout(Some(LIMIT))?;
        if self.generation.is_some_and(|newest| hand.generation <= newest) {
            let why = Text::truncated("a newer connection of this session is there".to_owned());
            return write_one(&mut connection, &Err::<Accepted, _>(Refused { why }));
        }
        self.generation = Some(hand.generation);
        self.inlet.go_on(connection, |connection, arrived| {
            write_one(connection, &Ok::<_, Refused>(Accepted { arrived }))?;
            connection.stream().set_write_timeout(None)?;
            Ok(hand.arrived)
        })?;
        // A reader that has ended needs no word.
        let _ = self.joined.send(());
        Ok(())
    }
}

impl Connections for Handed {
    fn next(&mut self, _: &Inlet) -> Result<(), String> {
        self.joined.recv_timeout(self.patience).map_err(|error| match error {
            RecvTimeoutError::Timeout => "its near end has not come back".to_owned(),
            RecvTimeoutError::Disconnected => "its server is gone".to_owned(),
        })
    }
}
