//! What a rank is told of its job when it begins.

use super::member::Member;
use super::pack::{Pack, Value};

use std::collections::BTreeMap;

/// Returns the answer; `hosts` has each rank's.
///
/// Each rank is told that no other one is on its node. Ranks have supervisors of their own, and
/// memory that these would share does not come back shared after a restart.
pub(super) fn answer(member: &Member, hosts: &[String]) -> Vec<u8> {
    let Member { namespace, rank, size, host } = member;
    let mut nodes = BTreeMap::<&str, (u32, u16)>::new();
    // Of each rank: its node's number, and how many before it are there.
    let places = hosts.iter().map(|host| {
        let next = u32::try_from(nodes.len()).unwrap_or(u32::MAX);
        let (node, ranks) = nodes.entry(host).or_insert((next, 0));
        *ranks = ranks.saturating_add(1);
        (*node, *ranks - 1)
    });
    let places: Vec<(u32, u16)> = places.collect();
    let count = u32::try_from(nodes.len()).unwrap_or(u32::MAX);
    let own = rank.to_string();
    let node = places.get(*rank as usize).map_or(0, |place| place.0);
    let about = [
        ("pmix.hname", Value::Text(host)),
        ("pmix.nodeid", Value::Word(node)),
        ("pmix.local.size", Value::Word(1)),
        ("pmix.node.size", Value::Word(1)),
        ("pmix.lpeers", Value::Text(&own)),
        ("pmix.lldr", Value::Rank(*rank)),
    ];
    let pack = Pack::default().count(1).text(namespace);
    let pack = [
        ("pmix.jobid", Value::Text(namespace)),
        ("pmix.job.size", Value::Word(*size)),
        ("pmix.univ.size", Value::Word(*size)),
        ("pmix.max.size", Value::Word(*size)),
        ("pmix.job.napps", Value::Word(1)),
        ("pmix.num.nodes", Value::Word(count)),
        ("pmix.app.size", Value::Word(*size)),
        ("pmix.aldr", Value::Rank(0)),
        ("pmix.node.arr", Value::Array(&about)),
    ]
    .iter()
    .fold(pack, |pack, (key, value)| pack.pair(key, value));
    let of_ranks = (0..*size).zip(hosts).zip(&places);
    let pack = of_ranks.fold(pack, |pack, ((number, host), (node, local))| {
        let blob = Pack::default().count(1).word(number);
        let blob = [
            ("pmix.rank", Value::Rank(number)),
            ("pmix.grank", Value::Rank(number)),
            ("pmix.apprank", Value::Rank(number)),
            ("pmix.appnum", Value::Word(0)),
            ("pmix.lrank", Value::Half(*local)),
            ("pmix.nrank", Value::Half(*local)),
            ("pmix.hname", Value::Text(host)),
            ("pmix.nodeid", Value::Word(*node)),
        ]
        .iter()
        .fold(blob, |blob, (key, value)| blob.pair(key, value));
        pack.pair("pmix.pblob", &Value::Bytes(&blob.0))
    });
    pack.0
}

#[cfg(test)]
mod tests {
    use super::super::pack::Unpack;
    use super::*;

    #[test]
    fn each_rank_is_alone_on_its_node() {
        let host = |name: &str| name.to_owned();
        let hosts = [host("a1"), host("b1"), host("a1")];
        let member = Member { namespace: "n".to_owned(), rank: 2, size: 3, host: host("a1") };
        let answer = answer(&member, &hosts);
        let mut all = Unpack(&answer);
        assert_eq!(all.one().and_then(|()| all.text()), Ok("n"));
        let mut keys = Vec::new();
        while !all.is_empty() {
            keys.push(all.pair().unwrap().0);
        }
        assert_eq!(keys.iter().filter(|key| **key == "pmix.pblob").count(), 3);
        let has = |bytes: &[u8]| answer.windows(bytes.len()).any(|window| window == bytes);
        // The peers of the third rank: itself.
        let peers = Pack::default().text("pmix.lpeers").word(0).value(&Value::Text("2")).0;
        assert!(has(&peers));
        // Two nodes, and the third rank is the second of its node.
        assert!(has(&Pack::default().pair("pmix.num.nodes", &Value::Word(2)).0));
        assert!(has(&Pack::default().pair("pmix.lrank", &Value::Half(1)).0));
    }
}
