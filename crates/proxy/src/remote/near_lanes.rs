//! The near end's lanes: many bytes of the client's memory cross by them, read and written by a
//! thread each.

use super::near::Near;
use kedge_device::Host;
use kedge_remote::{
    Aside, Bulk, Dialer, FIRST_LANE, LANE_BYTES, Lane, LaneReader, Links, MAX_LANES, Receiver,
    SessionKey, Which,
};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, SyncSender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::thread;
use std::time::Duration;

/// What a lane has to read before more goes with everything else.
const TO_READ: usize = 32;

/// How lanes are opened; and what is called, with why, when one is lost.
pub(super) struct Dialling {
    pub(super) key: SessionKey,
    pub(super) reconnect: Duration,
    pub(super) over: Arc<dyn Fn(&str) + Send + Sync>,
}

/// A part of the client's memory that the far end has asked for.
struct Wanted {
    number: u64,
    addr: u64,
    len: u32,
}

/// Where a lane's thread takes what it is to read from.
type Way = SyncSender<Wanted>;

#[derive(Default)]
pub(super) struct NearLanes {
    dialling: Option<Dialling>,
    begun: AtomicBool,
    ways: OnceLock<Vec<Way>>,
    /// How many have been used.
    used: AtomicUsize,
    arrived: Mutex<Arrived>,
    came: Condvar,
    /// Held while a message's memory is read or written, and by whoever hears that the message is
    /// complete: nobody does so with memory that no message names any more.
    reaches: RwLock<()>,
}

#[derive(Default)]
struct Arrived {
    /// Pieces that have come by each lane, and writes that have come by the line.
    pieces: [u64; MAX_LANES],
    writes: u64,
    over: bool,
}

impl NearLanes {
    pub(super) fn new(dialling: Dialling) -> NearLanes {
        NearLanes { dialling: Some(dialling), ..NearLanes::default() }
    }

    fn arrived(&self) -> MutexGuard<'_, Arrived> {
        self.arrived.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has memory go to the far end by a lane; `false` where it is to go with everything else.
    /// There are lanes soon after they are first needed.
    pub(super) fn read(&self, near: &Arc<Near>, number: u64, addr: u64, len: u32) -> bool {
        if (len as usize) < LANE_BYTES {
            return false;
        }
        let Some(ways) = self.ways.get() else {
            self.begin(near);
            return false;
        };
        let way = &ways[self.used.fetch_add(1, Ordering::Relaxed) % ways.len()];
        // Whoever reads the line waits for no lane's room: a lane may wait for the line.
        way.try_send(Wanted { number, addr, len }).is_ok()
    }

    /// So many bytes have been written that came by the line.
    pub(super) fn wrote(&self, near: &Arc<Near>, len: usize) {
        self.arrived().writes += 1;
        self.came.notify_all();
        if len >= LANE_BYTES {
            self.begin(near);
        }
    }

    /// Waits until so many pieces have come by a lane.
    pub(super) fn wait_for(&self, lane: u32, count: u64) -> Result<(), String> {
        if self.ways.get().is_none_or(|ways| lane as usize >= ways.len()) {
            return Err("it counts on a lane that there is not".into());
        }
        self.wait(|arrived| arrived.pieces[lane as usize] >= count)
    }

    /// Runs `then`, and no lane reads or writes the client's memory meanwhile.
    pub(super) fn between(&self, then: impl FnOnce()) {
        let _nobody = self.reaches.write().unwrap_or_else(PoisonError::into_inner);
        then();
    }

    fn wait(&self, is_there: impl Fn(&Arrived) -> bool) -> Result<(), String> {
        let not_yet = |arrived: &mut Arrived| !is_there(arrived) && !arrived.over;
        let waited = self.came.wait_while(self.arrived(), not_yet);
        match waited.unwrap_or_else(PoisonError::into_inner).over {
            true => Err("its lanes are gone".into()),
            false => Ok(()),
        }
    }

    /// Opens lanes on a thread of its own, once.
    fn begin(&self, near: &Arc<Near>) {
        if self.dialling.is_none() || self.begun.swap(true, Ordering::SeqCst) {
            return;
        }
        let near = near.clone();
        let open = move || {
            if let Err(why) = near.lanes.open(&near) {
                near.log(&format!("copies go by one connection to {}: {why}", near.server()));
            }
        };
        // Without it they go with everything else.
        let _ = thread::Builder::new().name("lanes".into()).stack_size(256 << 10).spawn(open);
    }

    fn open(&self, near: &Arc<Near>) -> Result<(), String> {
        let Some(dialling) = &self.dialling else { return Ok(()) };
        let count = kedge_remote::lanes();
        let mut opened = Vec::new();
        for lane in 0..count as u32 {
            match connect(near.server(), dialling, lane) {
                Ok(lane) => opened.push(lane),
                Err(why) => {
                    opened.iter().for_each(|(lane, _)| lane.end());
                    return Err(why);
                }
            }
        }
        let started = opened.into_iter().enumerate();
        let started = started.map(|(number, (lane, reader))| start(near, number, lane, reader));
        let ways = started.collect::<io::Result<Vec<(Way, Lane)>>>().map_err(|e| e.to_string())?;
        let (ways, lanes): (Vec<Way>, Vec<Lane>) = ways.into_iter().unzip();
        let _ = self.ways.set(ways);
        let head = Bulk::Lanes { count: count as u32 };
        lanes
            .iter()
            .try_for_each(|lane| {
                let piece = lane.piece(&head, |_| Ok::<(), io::Error>(()))?;
                lane.send(piece)
            })
            .map_err(|error| error.to_string())
    }

    fn lost(&self, why: &str) {
        self.arrived().over = true;
        self.came.notify_all();
        self.dialling.iter().for_each(|dialling| (dialling.over)(why));
    }
}

/// Both ends of a lane that has its first connection.
fn connect(
    server: &str,
    dialling: &Dialling,
    lane: u32,
) -> Result<(Lane, LaneReader<Dialer>), String> {
    let links = Links::single(None).map_err(|error| error.to_string())?;
    let dialer = Dialer::new(server, dialling.key, FIRST_LANE + lane, dialling.reconnect, |_| ());
    let mut receiver = Receiver::new(links.clone(), Which::Line, dialer);
    let connected = receiver.connect();
    connected.inspect_err(|_| links.end())?;
    Ok((Lane::new(links), LaneReader::new(receiver)))
}

/// Starts what reads the client's memory for a lane, and what writes it.
fn start(
    near: &Arc<Near>,
    number: usize,
    lane: Lane,
    reader: LaneReader<Dialer>,
) -> io::Result<(Way, Lane)> {
    let (way, wanted) = mpsc::sync_channel(TO_READ);
    let (writes, reads, to) = (near.clone(), near.clone(), lane.clone());
    let hear = move || {
        let why = writes.hear_lane(number, reader);
        writes.lanes.lost(&why);
    };
    thread::Builder::new().name("lane".into()).stack_size(256 << 10).spawn(hear)?;
    let answer = move || {
        for wanted in wanted {
            if let Err(why) = reads.read_for(&to, &wanted) {
                reads.lanes.lost(&why);
            }
        }
    };
    thread::Builder::new().name("lane-reads".into()).stack_size(256 << 10).spawn(answer)?;
    Ok((way, lane))
}

impl Near {
    /// Answers by a lane.
    fn read_for(&self, lane: &Lane, wanted: &Wanted) -> Result<(), String> {
        let Wanted { number, addr, len } = *wanted;
        let read = {
            let _reads = self.lanes.reaches.read().unwrap_or_else(PoisonError::into_inner);
            if !self.may_read(addr, u64::from(len)) {
                return Err(format!("it reads memory that no message names, at {addr:#x}"));
            }
            lane.piece(&Bulk::Bytes { number, len }, |out| self.client().read_client(addr, out))
        };
        match read {
            Ok(piece) => lane.send(piece).map_err(|error| error.to_string()),
            Err(error) => {
                self.say(&Aside::Bytes { number, bytes: Err(error.0) });
                Ok(())
            }
        }
    }

    /// Hears the far end by a lane until that ends: why it did.
    fn hear_lane(&self, number: usize, mut reader: LaneReader<Dialer>) -> String {
        let mut bytes = Vec::new();
        loop {
            let heard = match reader.next(&mut bytes) {
                Ok(Bulk::Write { addr, after, .. }) => self.write_after(addr, after, &bytes),
                Ok(_) => Err("it says by a lane what does not belong there".into()),
                Err(error) => Err(error.to_string()),
            };
            if let Err(why) = heard {
                return format!("the devices of {} are gone: {why}", self.server());
            }
            self.lanes.arrived().pieces[number] += 1;
            self.lanes.came.notify_all();
        }
    }

    /// Writes the client's memory once so many writes have come by the line: what came by it later
    /// waits for this.
    fn write_after(&self, addr: u64, after: u64, bytes: &[u8]) -> Result<(), String> {
        self.lanes.wait(|arrived| arrived.writes >= after)?;
        let _writes = self.lanes.reaches.read().unwrap_or_else(PoisonError::into_inner);
        self.write(addr, bytes)
    }
}
