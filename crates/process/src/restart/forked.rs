//! Memory that processes shared since a fork: they are to share it again.
//!
//! Only a fork makes two processes share pages of private memory until one of them writes. So a
//! process whose memory others have as well gets it before they are made, and each of them keeps
//! what comes from the same place of the image.

use super::Plan;
use super::places::{Parts, Place, Places, ZEROS, clip, equal, push};
use crate::EngineError;
use crate::lineage::Step;
use crate::state::{Backing, ProcessState, Saved};
use crate::track::{Run, common, without};
use kedge_image::Source;
use libc::pid_t;
use std::collections::{BTreeMap, BTreeSet};

/// What a process has of the memory of others while it makes them, and of the one that makes it.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Kept {
    /// Mappings that it keeps of its maker's, by their first addresses.
    mappings: BTreeSet<u64>,
    /// What is one mapping of those whom it makes, and several of its own.
    joined: BTreeSet<Run>,
    /// What in them is as it is to be, in order.
    same: Vec<Run>,
    /// What its maker has in them, and it has not.
    gone: Vec<Run>,
    /// Memory of others that it has until it has made those who share it, and whose it is.
    lent: Vec<(pid_t, Vec<Run>)>,
    /// What there is of mappings that have grown since, by their first addresses.
    grown: BTreeMap<u64, Run>,
}

impl Kept {
    pub(super) fn has(&self, saved: &Saved) -> bool {
        self.mappings.contains(&saved.start)
    }

    /// What is missing of a mapping that it keeps.
    pub(super) fn missing(&self, saved: &Saved) -> Vec<Run> {
        let there = self.grown.get(&saved.start);
        there.map_or_else(Vec::new, |there| without(&[run(saved)], &[*there]))
    }

    /// Whether it has none of its memory so far.
    pub(super) fn is_nothing(&self) -> bool {
        self.mappings.is_empty()
    }

    pub(super) fn gone(&self) -> &[Run] {
        &self.gone
    }

    /// What is to be one mapping while the process makes others, and has several protections else.
    pub(super) fn joined(&self) -> impl Iterator<Item = Run> {
        self.joined.iter().copied()
    }

    /// What the process gets when it has made others, in order.
    pub(super) fn late(&self) -> Vec<Run> {
        let mut late: Vec<Run> = self.lent.iter().flat_map(|(_, runs)| runs).copied().collect();
        late.sort_unstable();
        late
    }

    /// What it has of others until then, and has to get: whose, and what.
    pub(super) fn lent(&self) -> impl Iterator<Item = (pid_t, Vec<Run>)> {
        let missing = self.lent.iter().map(|(pid, runs)| (*pid, without(runs, &self.same)));
        missing.filter(|(_, runs)| !runs.is_empty())
    }

    /// What a process keeps of what it has itself, in mappings that it has in part: `there` are
    /// those that it is to have, each with that part. `had` and `has` tell where the memory comes
    /// from that it has and that it is to have.
    pub(super) fn of_itself(there: &[(&Saved, Run)], (had, has): (&Parts, &Parts)) -> Kept {
        let runs: Vec<Run> = there.iter().map(|(_, part)| *part).collect();
        let mut kept = keep(&runs, has, had);
        let keeps = there.iter().filter(|(_, part)| kept.mappings.contains(&part.0));
        let keeps: Vec<&(&Saved, Run)> = keeps.collect();
        let grown = keeps.iter().filter(|(own, part)| run(own) != *part);
        kept.grown = grown.map(|(own, part)| (own.start, *part)).collect();
        kept.mappings = keeps.iter().map(|(own, _)| own.start).collect();
        kept
    }

    /// Leaves in `sources` what the process gets itself before it makes others.
    pub(super) fn early(&self, sources: &mut Vec<Source>) {
        let (same, late) = (&self.same, self.late());
        if !same.is_empty() || !late.is_empty() {
            limit(sources, |parts| {
                let left = without(parts, around(same, parts));
                without(&left, around(&late, parts))
            });
        }
    }
}

/// Those of `runs` that may meet one of `parts`; both are in order.
pub(super) fn around<'a>(runs: &'a [Run], parts: &[Run]) -> &'a [Run] {
    let (Some((start, _)), Some((_, end))) = (parts.first(), parts.last()) else { return &[] };
    let first = runs.partition_point(|(_, last)| last <= start);
    let count = runs[first..].partition_point(|(first, _)| first < end);
    &runs[first..first + count]
}

/// Leaves of what `sources` have what `limited` makes of it.
pub(super) fn limit(sources: &mut Vec<Source>, limited: impl Fn(&[Run]) -> Vec<Run>) {
    for source in sources.iter_mut() {
        source.parts.sort_unstable();
        source.parts = limited(&source.parts);
    }
    sources.retain(|source| !source.parts.is_empty());
}

/// How processes share memory with those who make them, by their ids.
#[derive(Debug, Default)]
pub(super) struct Forked {
    kept: BTreeMap<pid_t, Kept>,
    /// Those who have memory of others, and those who make them.
    sharing: BTreeSet<pid_t>,
    /// Those who make them.
    early: BTreeSet<pid_t>,
    /// Siblings that make processes in their parents' place.
    siblings: BTreeMap<pid_t, pid_t>,
}

impl Forked {
    /// What they share if they are made in these steps.
    pub(super) fn of(plan: &Plan, steps: &[Step]) -> Result<Forked, EngineError> {
        let mut forked = Forked::default();
        // Memory that comes later comes to each process by itself.
        if plan.lazy || !plan.chain.iter().any(|(_, manifest)| manifest.forked) {
            return Ok(forked);
        }
        let states = plan.processes.iter().map(|state| (state.ids.pid, state));
        let states: BTreeMap<pid_t, &ProcessState> = states.collect();
        let mut known = Places::default();
        for state in &plan.processes {
            known.read(plan, state)?;
        }
        let mut makers = makers(steps, |pid| states.contains_key(&pid));
        forked.siblings = siblings(steps, &states, &makers, &known.parts);
        makers.extend(&forked.siblings);
        let order = steps.iter().filter_map(|step| match step {
            Step::Make { pid, .. } => states.contains_key(pid).then_some(*pid),
            _ => None,
        });
        forked.share(&states, &makers, &order.collect::<Vec<pid_t>>(), &known.parts);
        Ok(forked)
    }

    /// Of processes each of which keeps what it has itself.
    pub(super) fn of_kept(kept: BTreeMap<pid_t, Kept>) -> Forked {
        Forked { sharing: kept.keys().copied().collect(), kept, ..Forked::default() }
    }

    /// Finds what is kept by processes made in that `order`, by those `makers`.
    fn share(
        &mut self,
        states: &BTreeMap<pid_t, &ProcessState>,
        makers: &BTreeMap<pid_t, pid_t>,
        order: &[pid_t],
        own: &BTreeMap<pid_t, Parts>,
    ) {
        let inherits = |pid: pid_t| {
            let maker = makers.get(&pid)?;
            let candidates: Vec<Run> = candidates(states[&pid], states[maker]).map(run).collect();
            Some((*maker, candidates))
        };
        // What each is to have while it makes others, those first whom it makes.
        let (mut early, mut heirs) = (own.clone(), BTreeMap::<pid_t, Vec<Parts>>::new());
        for pid in order.iter().rev() {
            if let Some(heirs) = heirs.remove(pid) {
                let above = makers.get(pid).map(|maker| &own[maker]);
                let voted = vote(&own[pid], &heirs, above.unwrap_or(&Parts::new()));
                early.insert(*pid, voted);
            }
            if let Some((maker, candidates)) = inherits(*pid).filter(|(_, runs)| !runs.is_empty()) {
                heirs.entry(maker).or_default().push(clip(&early[pid], &candidates));
            }
        }
        for pid in order {
            let mut kept = match makers.get(pid) {
                Some(maker) => self.keep(states, makers, (*pid, *maker), &early),
                None => Kept::default(),
            };
            kept.lent = lent(&own[pid], &early[pid], own);
            if !kept.mappings.is_empty() {
                self.sharing.extend([*pid, makers[pid]]);
                self.early.insert(makers[pid]);
            }
            if kept != Kept::default() {
                self.kept.insert(*pid, kept);
            }
        }
    }

    /// What a process keeps of its maker's; what has to be one mapping of others is noted.
    fn keep(
        &mut self,
        states: &BTreeMap<pid_t, &ProcessState>,
        makers: &BTreeMap<pid_t, pid_t>,
        (pid, maker): (pid_t, pid_t),
        early: &BTreeMap<pid_t, Parts>,
    ) -> Kept {
        let state = states[&pid];
        let (mut inside, mut joiners) = (Vec::new(), BTreeMap::new());
        for saved in candidates(state, states[&maker]) {
            if let Some(found) = self.joiners(states, makers, maker, (saved, state)) {
                inside.push(run(saved));
                joiners.insert(saved.start, (run(saved), found));
            }
        }
        let kept = keep(&inside, &early[&pid], &early[&maker]);
        joiners.retain(|start, _| kept.mappings.contains(start));
        for (run, found) in joiners.into_values() {
            for joiner in found {
                self.kept.entry(joiner).or_default().joined.insert(run);
            }
        }
        kept
    }

    /// Those who have to make one mapping of what they have in the place of `own`, for a process
    /// that `maker` makes to have it as one; none where they cannot. The kernel joins adjoining
    /// mappings with one protection if all are new, or all were one when they were inherited.
    fn joiners(
        &self,
        states: &BTreeMap<pid_t, &ProcessState>,
        makers: &BTreeMap<pid_t, pid_t>,
        mut maker: pid_t,
        own: (&Saved, &ProcessState),
    ) -> Option<Vec<pid_t>> {
        let mut joiners = Vec::new();
        loop {
            let parts = parts_of(states[&maker], own)?;
            if parts.len() == 1 {
                return Some(joiners);
            }
            joiners.push(maker);
            let kept = self.kept.get(&maker);
            let kept = parts.iter().filter(|part| kept.is_some_and(|kept| kept.has(part))).count();
            match kept {
                0 => return Some(joiners),
                _ if kept == parts.len() => maker = *makers.get(&maker)?,
                _ => return None,
            }
        }
    }

    /// Whether a process gets its memory before those are made whom it makes.
    pub(super) fn is_early(&self, pid: pid_t) -> bool {
        self.early.contains(&pid)
    }

    pub(super) fn kept(&self, pid: pid_t) -> Kept {
        self.kept.get(&pid).filter(|_| self.sharing.contains(&pid)).cloned().unwrap_or_default()
    }

    /// Who makes the process, if it is not its parent.
    pub(super) fn sibling(&self, pid: pid_t) -> Option<pid_t> {
        self.siblings.get(&pid).copied()
    }
}

/// Of each process of the image, the one whose memory it has when it is made: helpers have that of
/// their own makers.
fn makers(steps: &[Step], is_saved: impl Fn(pid_t) -> bool) -> BTreeMap<pid_t, pid_t> {
    let (mut memory, mut makers) = (BTreeMap::new(), BTreeMap::new());
    for step in steps {
        let Step::Make { parent, pid } = step else { continue };
        let maker = memory.get(parent).copied();
        if is_saved(*pid) {
            makers.extend(maker.map(|maker| (*pid, maker)));
            memory.insert(*pid, *pid);
        } else {
            match maker {
                Some(maker) => memory.insert(*pid, maker),
                None => memory.remove(pid),
            };
        }
    }
    makers
}

/// Most siblings of one parent with which others are compared.
const MAX_COMPARED: usize = 8;

/// Those who have far more in common with a sibling that is made before them than with their maker:
/// who forked them all has ended. Siblings that the other can make: of the same session, which they
/// do not lead, and with the same signal at their end (CLONE_PARENT).
fn siblings(
    steps: &[Step],
    states: &BTreeMap<pid_t, &ProcessState>,
    makers: &BTreeMap<pid_t, pid_t>,
    own: &BTreeMap<pid_t, Parts>,
) -> BTreeMap<pid_t, pid_t> {
    let shared = |pid: pid_t, other: pid_t| {
        let candidates: Vec<Run> = candidates(states[&pid], states[&other]).map(run).collect();
        let same = common(&equal(&own[&pid], &own[&other]), &candidates);
        same.iter().map(|(start, end)| end - start).sum::<u64>()
    };
    let (mut found, mut compared) = (BTreeMap::new(), BTreeMap::<_, Vec<pid_t>>::new());
    for step in steps {
        let Step::Make { parent, pid } = step else { continue };
        let Some(state) = states.get(pid) else { continue };
        let ids = state.ids;
        // Not a helper's.
        if ids.session == *pid || ids.parent != *parent {
            continue;
        }
        let family = compared.entry((*parent, ids.session, state.exit_signal)).or_default();
        let best = family.iter().map(|other| (shared(*pid, *other), *other)).max();
        let makers = makers.get(pid).map_or(0, |maker| shared(*pid, *maker));
        match best {
            Some((bytes, other)) if bytes / 2 > makers => drop(found.insert(*pid, other)),
            _ if family.len() < MAX_COMPARED => family.push(*pid),
            _ => {}
        }
    }
    found
}

fn run(saved: &Saved) -> Run {
    (saved.start, saved.end)
}

/// The mappings of a process that lie inside of what its maker has like them, in order.
fn candidates<'a>(
    own: &'a ProcessState,
    maker: &'a ProcessState,
) -> impl Iterator<Item = &'a Saved> {
    own.mappings.iter().filter(move |saved| parts_of(maker, (saved, own)).is_some())
}

/// The maker's mappings that a mapping lies in: one like it, or several that adjoin each other and
/// are like it but for their protection. They can be one for as long as all can be written.
fn parts_of<'a>(
    maker: &'a ProcessState,
    (saved, own): (&Saved, &ProcessState),
) -> Option<&'a [Saved]> {
    let from = maker.mappings.partition_point(|theirs| theirs.end <= saved.start);
    let count = maker.mappings[from..].partition_point(|theirs| theirs.start < saved.end);
    let parts = &maker.mappings[from..from + count];
    let inside = parts.first()?.start <= saved.start && saved.end <= parts.last()?.end;
    let code = |part: &Saved| part.protection & libc::PROT_EXEC;
    let adjoin = |pair: &[Saved]| pair[0].end == pair[1].start && code(&pair[0]) == code(&pair[1]);
    let are_one = inside
        && parts.windows(2).all(adjoin)
        && parts.iter().all(|theirs| are_alike((saved, own), (theirs, maker)));
    are_one.then_some(parts)
}

/// Whether a part of `theirs` could have been made as `own`, all but its protection.
pub(super) fn are_alike(
    (own, state): (&Saved, &ProcessState),
    (theirs, maker): (&Saved, &ProcessState),
) -> bool {
    let has = |saved: &Saved, flag: &str| saved.flags.iter().any(|own| own == flag);
    // One that grows does so into what lies below it; what may be dropped is nobody else's; and a
    // huge page that two have takes another one when either writes.
    let alone = ["gd", "dp"].iter().any(|flag| has(own, flag) || has(theirs, flag));
    let huge = own.huge != 0 || theirs.huge != 0;
    let told = has(own, "nr") != has(theirs, "nr") || own.policy != theirs.policy;
    if own.shared || theirs.shared || alone || huge || told {
        return false;
    }
    // None in a file's second part: those of files are not joined.
    let inside = own.start.checked_sub(theirs.start);
    let offset = inside.and_then(|inside| theirs.offset.checked_add(inside)) == Some(own.offset);
    match (&own.backing, &theirs.backing) {
        (Backing::Anonymous, Backing::Anonymous) => true,
        (Backing::File(a), Backing::File(b)) => {
            offset && state.files.get(*a) == maker.files.get(*b)
        }
        (Backing::Description(a), Backing::Description(b)) => offset && a == b,
        _ => false,
    }
}

/// Counts who of the heirs has what at one address.
#[derive(Debug, Default)]
struct Votes {
    counts: BTreeMap<Place, usize>,
    ranks: BTreeSet<(usize, Place)>,
}

impl Votes {
    fn count(&mut self, place: Place, by: isize) {
        let before = self.of(place);
        let now = before.saturating_add_signed(by);
        self.ranks.remove(&(before, place));
        if now == 0 {
            self.counts.remove(&place);
        } else {
            self.counts.insert(place, now);
            self.ranks.insert((now, place));
        }
    }

    fn of(&self, place: Place) -> usize {
        self.counts.get(&place).copied().unwrap_or(0)
    }

    /// What most of them have, if that is more than one; else what `above` has, if one has that.
    fn best(&self, above: Option<Place>) -> Option<(usize, Place)> {
        let most = self.ranks.last().copied().filter(|(count, _)| *count > 1);
        let above = above.filter(|place| self.of(*place) > 0).map(|place| (1, place));
        most.or(above).filter(|(_, place)| *place != ZEROS)
    }
}

/// What a process that has `own` is to have while it makes its heirs: its own, but where more of
/// them share something else. `above` is what its own maker has.
fn vote(own: &Parts, heirs: &[Parts], above: &Parts) -> Parts {
    const OWN: usize = 0;
    const ABOVE: usize = 1;
    let lists = [own, above].into_iter().chain(heirs).enumerate();
    let mut ends: Vec<(u64, bool, usize, Place)> = Vec::new();
    for (list, parts) in lists {
        ends.extend(parts.iter().flat_map(|((start, end), place)| {
            [(*start, true, list, *place), (*end, false, list, *place)]
        }));
    }
    // Ends before beginnings.
    ends.sort_unstable();
    let (mut now, mut votes, mut parts) = ([None, None], Votes::default(), Parts::new());
    for pair in 0..ends.len() {
        let (at, begins, list, place) = ends[pair];
        match list {
            OWN | ABOVE => now[list] = begins.then_some(place),
            _ => votes.count(place, if begins { 1 } else { -1 }),
        }
        let Some((next, ..)) = ends.get(pair + 1).filter(|(next, ..)| *next > at) else { continue };
        let other = votes
            .best(now[ABOVE])
            .filter(|(count, _)| now[OWN].is_none_or(|own| votes.of(own) < *count));
        if let Some(place) = other.map(|(_, place)| place).or(now[OWN]) {
            push(&mut parts, (at, *next), place);
        }
    }
    parts
}

/// What a process that is to have `own` has of others while it makes them, which is `early`, and
/// whose it is.
fn lent(own: &Parts, early: &Parts, all: &BTreeMap<pid_t, Parts>) -> Vec<(pid_t, Vec<Run>)> {
    let runs: Vec<Run> = early.iter().map(|(run, _)| *run).collect();
    let mut missing = without(&runs, &equal(early, own));
    let mut lent = Vec::new();
    for (pid, parts) in all {
        if missing.is_empty() {
            break;
        }
        let some = common(&equal(early, parts), &missing);
        if !some.is_empty() {
            missing = without(&missing, &some);
            lent.push((*pid, some));
        }
    }
    lent
}

/// What is kept of `candidates` by a process that is to have `own`, made by one that has `theirs`.
fn keep(candidates: &[Run], own: &Parts, theirs: &Parts) -> Kept {
    let same = equal(own, theirs);
    let mappings = candidates
        .iter()
        .copied()
        .filter(|run| !common(around(&same, &[*run]), &[*run]).is_empty());
    let mappings: Vec<Run> = mappings.collect();
    let runs = |parts: &Parts| parts.iter().map(|(run, _)| *run).collect::<Vec<Run>>();
    let same = common(&same, &mappings);
    let gone = without(&common(&runs(theirs), &mappings), &runs(own));
    let mappings = mappings.iter().map(|(start, _)| *start).collect();
    Kept { mappings, same, gone, ..Kept::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_from_one_place_is_kept() {
        let theirs = vec![((10, 20), (0, 7)), ((20, 30), (0, 8)), ((40, 50), (0, 9))];
        let own = vec![((12, 25), (0, 7)), ((25, 28), (0, 8)), ((40, 50), (1, 9))];
        assert_eq!(equal(&own, &theirs), [(12, 20), (25, 28)]);
        let kept = keep(&[(10, 30), (35, 60)], &own, &theirs);
        let expected = Kept {
            mappings: BTreeSet::from([10]),
            same: vec![(12, 20), (25, 28)],
            gone: vec![(10, 12), (28, 30)],
            ..Kept::default()
        };
        assert_eq!(kept, expected);
    }

    #[test]
    fn what_more_share_is_there_first() {
        let (old, new, child) = ((0, 1), (0, 2), (0, 3));
        let own = vec![((0, 10), old), ((10, 20), new), ((30, 40), new)];
        let heirs = [
            vec![((0, 40), old)],
            vec![((0, 5), child), ((5, 15), old), ((30, 40), new)],
            vec![((15, 20), child)],
        ];
        // Two share the old page 10 to 15; nobody else has 15 to 20 and 20 to 30.
        let early = vote(&own, &heirs, &vec![]);
        let expected = vec![((0, 10), old), ((10, 15), old), ((15, 20), new), ((30, 40), new)];
        assert_eq!(early.len(), 3);
        assert_eq!(equal(&early, &expected), [(0, 20), (30, 40)]);
        // But where the one that makes the process has it.
        let early = vote(&own, &heirs, &vec![((15, 28), old)]);
        assert_eq!(early, [((0, 28), old), ((30, 40), new)]);
        let all = BTreeMap::from([(4, own.clone()), (5, heirs[0].clone()), (6, heirs[1].clone())]);
        assert_eq!(lent(&own, &early, &all), [(5, vec![(10, 28)])]);
    }

    #[test]
    fn helpers_have_the_memory_of_their_makers() {
        let make = |parent, pid| Step::Make { parent, pid };
        let steps = [
            make(0, 5),
            Step::Lead { pid: 5 },
            make(5, 2),
            make(2, 7),
            Step::End { pid: 2, parent: 5 },
            make(0, 2),
            make(2, 8),
            make(7, 9),
        ];
        assert_eq!(makers(&steps, |pid| pid > 4), BTreeMap::from([(7, 5), (9, 7)]));
    }
}
