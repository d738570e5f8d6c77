//! Connections of a session's links, as the server hands them over.

use super::turns::Turns;
use kedge_keys::{Connection, Secrets};
use kedge_remote::{
    Accepted, Connections, FIRST_IMAGE, FIRST_LANE, HandedOver, Handover, Inlet, Links, MAX_LANES,
    Meter, Receiver, Refused, ToNear, Which, write_one,
};
use kedge_socket::{Channel, SocketError};
use kedge_wire::Text;
use std::collections::HashMap;
use std::io;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

/// How much longer than its near end a far end waits for a connection, so that it is never the
/// first to give up.
const WAIT_MARGIN: Duration = Duration::from_secs(30);
/// Longest wait that a near end may ask for.
const MAX_WAIT: Duration = Duration::from_secs(3600);
/// For a near end to take an answer.
const LIMIT: Duration = Duration::from_secs(5);
/// Links for images' bytes at a time.
const MAX_IMAGES: usize = 4;
/// Numbers of such links, of which is known which are over.
const KNOWN: u32 = 64;
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

/// A lane, or a link for an image's bytes, as it begins.
pub(super) struct NewLink {
    pub(super) number: u32,
    pub(super) links: Arc<Links>,
    pub(super) reading: Receiver<Handed>,
}

/// What the server says, but for what it says of an image's bytes.
struct Hearing<I, T> {
    turns: Arc<Turns>,
    links: [Joins; 2],
    /// Of lanes, by number.
    lanes: [Option<Joins>; MAX_LANES],
    /// Of images' bytes, by number.
    images: HashMap<u32, (Arc<Links>, Joins)>,
    patience: Duration,
    begun: I,
    tell: T,
    /// Of all links.
    meter: Option<Arc<dyn Meter>>,
}

/// The receiving ends of both links, whose connections a thread hears the server for.
pub(super) struct Received {
    pub(super) line: Receiver<Handed>,
    pub(super) aside: Receiver<Handed>,
}

/// Hears the server on a thread of its own, after `begin`: what the session begins with is older
/// than what the server hands over. `begun` gets lanes and links for the bytes of images, `tell`
/// what the near end is to be told.
///
/// # Errors
/// The thread cannot be started.
pub(super) fn hear(
    control: Channel,
    links_of: &Arc<Links>,
    reconnect_ms: u32,
    begin: impl FnOnce(Received) -> io::Result<Receiver<Handed>>,
    turns: Arc<Turns>,
    begun: impl Fn(NewLink) + Send + 'static,
    tell: impl Fn(&ToNear) + Send + 'static,
) -> io::Result<Receiver<Handed>> {
    let patience = Duration::from_millis(reconnect_ms.into()).min(MAX_WAIT) + WAIT_MARGIN;
    let (line, to_line) = link(links_of, Which::Line, patience);
    let (aside, to_aside) = link(links_of, Which::Aside, patience);
    let line = begin(Received { line, aside })?;
    let links = [to_line, to_aside];
    let meter = links_of.meter();
    let (lanes, images) = Default::default();
    let mut hearing = Hearing { turns, links, lanes, images, patience, begun, tell, meter };
    let hear = move || hearing.hear_all(&control);
    thread::Builder::new().name("handed".into()).stack_size(128 << 10).spawn(hear)?;
    Ok(line)
}

/// Makes the receiving end of a link, and where its connections go.
fn link(links: &Arc<Links>, which: Which, patience: Duration) -> (Receiver<Handed>, Joins) {
    let (sender, joined) = mpsc::channel();
    let receiver = Receiver::new(links.clone(), which, Handed { joined, patience });
    let inlet = receiver.inlet().clone();
    (receiver, Joins { inlet, joined: sender, generation: None })
}

/// Begins a link of its own with its first connection; nothing of it stays where that fails.
fn begin(
    hand: Handover,
    connection: Connection,
    meter: &Option<Arc<dyn Meter>>,
    patience: Duration,
) -> io::Result<(Joins, NewLink)> {
    let links = Links::single(meter.clone())?;
    let (reading, mut joins) = link(&links, Which::Line, patience);
    joins.take(hand, connection).inspect_err(|_| links.end())?;
    Ok((joins, NewLink { number: hand.link, links, reading }))
}

fn refuse(connection: &mut Connection, why: &str) -> io::Result<()> {
    connection.stream().set_write_timeout(Some(LIMIT))?;
    let why = Text::truncated(why.to_owned());
    write_one(connection, &Err::<Accepted, _>(Refused { why }))
}

impl<I: Fn(NewLink), T: Fn(&ToNear)> Hearing<I, T> {
    fn hear_all(&mut self, control: &Channel) {
        loop {
            let ((what, secrets), mut fds) =
                match control.receive::<(HandedOver, Option<Secrets>)>(LOOK) {
                    Ok(handed) => handed,
                    Err(SocketError::TimedOut { .. }) => continue,
                    // Without its server a link that is cut has no other connection.
                    Err(_) => return,
                };
            match what {
                HandedOver::Link { hand } => {
                    let Some(stream) = fds.pop().map(TcpStream::from) else { continue };
                    // A connection that fails is dialled again.
                    let Ok(connection) = Connection::new(stream, secrets) else { continue };
                    let _ = self.connected(hand, connection);
                }
                HandedOver::Notice { text } => (self.tell)(&ToNear::Line { text }),
                // Its near end lets go of the line then, which ends this proxy.
                // Without a thread for them nobody is held up, and nobody else can help it.
                HandedOver::Turns { on } => drop(self.turns.heed(on)),
                HandedOver::End { why } => (self.tell)(&ToNear::Closed { why }),
            }
        }
    }

    fn connected(&mut self, hand: Handover, connection: Connection) -> io::Result<()> {
        match Which::of_number(hand.link) {
            Some(which) => self.links[which as usize].take(hand, connection),
            None if hand.link < FIRST_IMAGE => self.lane(hand, connection),
            None => self.image(hand, connection),
        }
    }

    /// A connection of a lane, which begins with its first.
    fn lane(&mut self, hand: Handover, connection: Connection) -> io::Result<()> {
        let lane = &mut self.lanes[(hand.link - FIRST_LANE) as usize];
        if let Some(joins) = lane {
            return joins.take(hand, connection);
        }
        let (joins, begun) = begin(hand, connection, &self.meter, self.patience)?;
        *lane = Some(joins);
        (self.begun)(begun);
        Ok(())
    }

    /// A connection of a link for an image's bytes, which begins with its first.
    fn image(&mut self, hand: Handover, mut connection: Connection) -> io::Result<()> {
        if let Some((links, joins)) = self.images.get_mut(&hand.link) {
            match links.is_over() {
                true => return refuse(&mut connection, "that image is over"),
                false => return joins.take(hand, connection),
            }
        }
        let newest = self.images.keys().copied().max().unwrap_or(FIRST_IMAGE);
        if hand.link < FIRST_IMAGE || hand.link.saturating_add(KNOWN) < newest {
            return refuse(&mut connection, "that image is over");
        }
        if self.images.values().filter(|(links, _)| !links.is_over()).count() >= MAX_IMAGES {
            return refuse(&mut connection, "too many images of this session cross already");
        }
        // A connection that comes late is not taken for a link's first.
        let oldest = hand.link.max(newest).saturating_sub(KNOWN);
        self.images.retain(|number, _| *number >= oldest);
        let (joins, begun) = begin(hand, connection, &self.meter, self.patience)?;
        self.images.insert(hand.link, (begun.links.clone(), joins));
        (self.begun)(begun);
        Ok(())
    }
}

impl Joins {
    /// Has the link go on with a connection, if it is newer than those before.
    fn take(&mut self, hand: Handover, mut connection: Connection) -> io::Result<()> {
        connection.stream().set_read_timeout(None)?;
        if self.generation.is_some_and(|newest| hand.generation <= newest) {
            return refuse(&mut connection, "a newer connection of this session is there");
        }
        connection.stream().set_write_timeout(Some(LIMIT))?;
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
