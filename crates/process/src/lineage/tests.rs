use super::*;

/// What the kernel does.
#[derive(Debug, Clone, Default)]
struct Kernel {
    processes: BTreeMap<pid_t, Process>,
}

#[derive(Debug, Clone, Copy)]
struct Process {
    parent: pid_t,
    session: pid_t,
    group: pid_t,
    adopts: bool,
    /// It has ended and nobody has waited for it.
    zombie: bool,
}

impl Kernel {
    fn new() -> Kernel {
        let init = Process { parent: 0, session: 0, group: 0, adopts: true, zombie: false };
        Kernel { processes: BTreeMap::from([(0, init)]) }
    }

    fn make(&mut self, parent: pid_t, pid: pid_t) {
        let maker = self.processes[&parent];
        assert!(!maker.zombie && !self.is_used(pid), "{pid} is used");
        let child = Process { parent, adopts: false, ..maker };
        self.processes.insert(pid, child);
    }

    /// As the id of a process, or as that of a session or group.
    fn is_used(&self, id: pid_t) -> bool {
        let of = |p: &Process| p.session == id || p.group == id;
        self.processes.contains_key(&id) || self.processes.values().any(of)
    }

    fn lead(&mut self, pid: pid_t) -> bool {
        if self.processes.values().any(|process| process.group == pid) {
            return false;
        }
        let own = self.processes.get_mut(&pid).unwrap();
        (own.session, own.group) = (pid, pid);
        true
    }

    fn join(&mut self, pid: pid_t, group: pid_t) -> bool {
        let own = self.processes[&pid];
        let there = |p: &Process| p.group == group && p.session == own.session;
        let exists = group == pid || self.processes.values().any(there);
        if own.session == pid || !exists {
            return false;
        }
        self.processes.get_mut(&pid).unwrap().group = group;
        true
    }

    fn end(&mut self, pid: pid_t) {
        let mut heir = self.processes[&pid].parent;
        while !self.processes[&heir].adopts || self.processes[&heir].zombie {
            heir = self.processes[&heir].parent;
        }
        for process in self.processes.values_mut().filter(|process| process.parent == pid) {
            process.parent = heir;
        }
        self.processes.get_mut(&pid).unwrap().zombie = true;
    }

    fn collect(&mut self, pid: pid_t, parent: pid_t) {
        assert_eq!(self.processes[&pid].parent, parent);
        assert!(self.processes.remove(&pid).unwrap().zombie);
    }

    fn does(&mut self, step: Step) {
        match step {
            Step::Make { parent, pid } => {
                assert!(!self.processes.contains_key(&pid), "{pid} twice");
                let maker = self.processes[&parent];
                self.processes.insert(pid, Process { parent, adopts: false, ..maker });
            }
            Step::Lead { pid } => assert!(self.lead(pid), "{pid} cannot lead a session"),
            Step::Adopt { pid, on } => self.processes.get_mut(&pid).unwrap().adopts = on,
            Step::Join { pid, group } => assert!(self.join(pid, group), "{pid} into {group}"),
            Step::End { pid, parent } => {
                self.end(pid);
                self.collect(pid, parent);
            }
        }
    }

    fn ids(&self) -> Vec<Ids> {
        let all = self.processes.iter().filter(|(pid, _)| **pid != 0);
        let ids = |(pid, process): (&pid_t, &Process)| {
            let Process { parent, session, group, .. } = *process;
            Ids { pid: *pid, parent, group, session }
        };
        all.map(ids).collect()
    }
}

fn come_back(members: &[Ids]) {
    let steps = steps(members, []).unwrap_or_else(|pid| panic!("{pid:?} of {members:?}"));
    let mut kernel = Kernel::new();
    steps.iter().for_each(|step| kernel.does(*step));
    let mut expected = members.to_vec();
    expected.sort_by_key(|ids| ids.pid);
    assert_eq!(kernel.ids(), expected, "{steps:?}");
}

fn ids([pid, parent, group, session]: [pid_t; 4]) -> Ids {
    Ids { pid, parent, group, session }
}

#[test]
fn who_stayed_in_a_session_that_two_have_left_comes_back() {
    come_back(&[[10, 0, 0, 0], [11, 10, 11, 11], [12, 11, 12, 12], [13, 12, 0, 0]].map(ids));
}

#[test]
fn a_subreaper_has_orphans_of_other_sessions() {
    come_back(&[[10, 0, 0, 0], [11, 10, 11, 11], [12, 10, 11, 11]].map(ids));
    // Whose leader has ended.
    come_back(&[[10, 0, 0, 0], [12, 10, 11, 11], [13, 12, 13, 13]].map(ids));
    // Two of them, one below the other.
    come_back(&[[10, 0, 0, 0], [11, 10, 0, 0], [12, 11, 9, 9], [13, 10, 9, 9]].map(ids));
}

#[test]
fn a_leader_may_have_left_its_group() {
    come_back(&[[10, 0, 10, 10], [11, 10, 12, 10], [12, 10, 12, 10], [13, 10, 11, 10]].map(ids));
}

#[test]
fn what_no_tree_has_is_refused() {
    // A parent that is none, two that are each other's, a session that its leader is not in.
    for bad in [
        vec![[10, 9, 0, 0]],
        vec![[10, 11, 0, 0], [11, 10, 0, 0]],
        vec![[10, 0, 0, 0], [11, 0, 0, 10]],
        vec![[10, 0, 10, 10], [11, 0, 10, 0]],
    ] {
        let members: Vec<Ids> = bad.into_iter().map(ids).collect();
        assert!(steps(&members, []).is_err(), "{members:?}");
    }
}

/// Whatever programs do, they come back.
#[test]
fn trees_that_grow_at_random_come_back() {
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut draw = move |most: usize| {
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % most
    };
    for _ in 0..20_000 {
        let mut kernel = Kernel::new();
        let mut next = 2;
        kernel.make(0, next);
        for _ in 0..draw(60) {
            let alive: Vec<pid_t> = kernel
                .processes
                .iter()
                .filter(|(pid, p)| **pid != 0 && !p.zombie)
                .map(|(pid, _)| *pid)
                .collect();
            if alive.is_empty() {
                break;
            }
            let pid = alive[draw(alive.len())];
            match draw(12) {
                0..=4 => {
                    next += 1;
                    kernel.make(pid, next);
                }
                5 => drop(kernel.lead(pid)),
                6 => drop(kernel.join(pid, pid)),
                7 => drop(kernel.join(pid, kernel.processes[&alive[draw(alive.len())]].group)),
                8 => kernel.processes.get_mut(&pid).unwrap().adopts = true,
                9..=10 => kernel.end(pid),
                _ => {
                    let zombies: Vec<(pid_t, Process)> = kernel
                        .processes
                        .iter()
                        .filter(|(_, p)| p.zombie)
                        .map(|(pid, p)| (*pid, *p))
                        .collect();
                    if let Some((pid, process)) = zombies.first() {
                        kernel.collect(*pid, process.parent);
                    }
                }
            }
        }
        let members = kernel.ids();
        let leads = |pid: pid_t| members.iter().any(|ids| ids.group == pid && ids.pid != pid);
        if members.iter().any(|ids| ids.group == 0 && leads(ids.pid)) {
            assert!(steps(&members, []).is_err(), "{members:?}");
        } else {
            come_back(&members);
        }
    }
}
