//! A lane of the far end, from its beginning to its end.

use super::far_lanes::{TO_SEND, Way};
use super::handed::{Handed, NewLink};
use super::outlet::Line;
use kedge_remote::{Bulk, FIRST_LANE, Lane, LaneReader, MAX_LANES};
use std::sync::atomic::AtomicU64;
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::thread;

/// Serves a lane that begins.
pub(super) fn begun(line: &Arc<Line>, link: NewLink) {
    let NewLink { number, links, reading } = link;
    let lane = Lane::new(links);
    let line = line.clone();
    let serves = lane.clone();
    let serve = move || {
        let number = (number - FIRST_LANE) as usize;
        let counted_on = serve(&line, number, &serves, LaneReader::new(reading)).is_some();
        serves.end();
        if counted_on {
            line.over();
        }
    };
    if thread::Builder::new().name("lane".into()).stack_size(256 << 10).spawn(serve).is_err() {
        lane.end();
    }
}

/// Returns once the lane has ended: `None` where nobody has counted on it.
fn serve(
    line: &Arc<Line>,
    number: usize,
    lane: &Lane,
    mut reader: LaneReader<Handed>,
) -> Option<()> {
    let mut bytes = Vec::new();
    let Ok(Bulk::Lanes { count }) = reader.next(&mut bytes) else { return None };
    let count =
        usize::try_from(count).ok().filter(|count| (number + 1..=MAX_LANES).contains(count))?;
    let (pieces, to_send) = mpsc::sync_channel::<Vec<u8>>(TO_SEND);
    let sends = lane.clone();
    let send = move || to_send.into_iter().try_for_each(|piece| sends.send(piece));
    thread::Builder::new().name("lane-writes".into()).stack_size(256 << 10).spawn(send).ok()?;
    let (pieces, count_of) = (Mutex::new(pieces), AtomicU64::new(0));
    let way = Way { lane: lane.clone(), pieces, count: count_of };
    line.lanes.is_there(number, Arc::new(way), count);
    let mut room = line.room();
    while let Ok(Bulk::Bytes { number, .. }) = reader.next(&mut room) {
        line.arrived(number, Ok(room));
        room = line.room();
    }
    Some(())
}
