//! Files of proxies, and what becomes of them.

use super::*;
use serde_json::Value;
use std::fs;

/// A folder of this test's, gone at its end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("kedge-trace-{name}-{}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Folder(path)
    }

    fn merged(&self, limit: u64) -> (Merged, Value) {
        let file = self.0.join("trace.json");
        let merged = merge(&self.0, &Wanted { file: Some(file.clone()), limit }).unwrap();
        let table = merge(&self.0, &Wanted { file: None, limit }).unwrap();
        assert_eq!(table, merged, "the table alone");
        (merged, serde_json::from_slice(&fs::read(file).unwrap()).unwrap())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn span(kind: Kind, name: &str, begin: u64) -> Span {
    let (name, end) = (name.to_owned(), begin + 1500);
    let (device, bytes) = (Some(1), if kind == Kind::Copy { 64 } else { 0 });
    Span { kind, name, begin, end, lane: 7, device, bytes, outcome: 0 }
}

fn spans(trace: &Value) -> Vec<&Value> {
    let events = trace["traceEvents"].as_array().unwrap();
    events.iter().filter(|event| event["ph"] == "X").collect()
}

#[test]
fn what_was_written_is_in_the_trace() {
    let folder = Folder::new("whole");
    let mut writer = Writer::create(&folder.0, 1 << 20, 42, "./a \"b\"").unwrap();
    writer.span(Span { device: None, lane: 43, outcome: 700, ..span(Kind::Call, "cuInit", 1001) });
    writer.span(span(Kind::Kernel, "sums(int*)", 2000));
    writer.span(span(Kind::Copy, "copy to device", 4000));
    writer.span(Span { device: None, ..span(Kind::Pause, "pause", 6000) });
    // What a killed proxy has been writing.
    writer.flush();
    writer.file.write_all(b"{\"kind\":\"kern").unwrap();
    let (merged, trace) = folder.merged(1 << 20);
    assert_eq!((merged.processes, merged.spans, merged.left, merged.damaged), (1, 4, 0, 1));
    let all = spans(&trace);
    assert_eq!((&all[0]["ts"], &all[0]["dur"]), (&1.001.into(), &1.5.into()));
    assert_eq!((&all[0]["pid"], &all[0]["tid"]), (&42.into(), &43.into()));
    assert_eq!(all[0]["args"]["result"], 700);
    assert_eq!((&all[1]["name"], &all[1]["cat"]), (&"sums(int*)".into(), &"kernel".into()));
    assert_eq!((&all[1]["tid"], &all[2]["args"]["bytes"]), (&all[2]["tid"], &64.into()));
    let tids: Vec<_> = all.iter().map(|span| span["tid"].as_u64().unwrap()).collect();
    assert!(tids[1] > 1 << 22 && tids[1] < 1 << 31 && !tids[..3].contains(&tids[3]), "{tids:?}");
    let events = trace["traceEvents"].as_array().unwrap();
    let names: Vec<_> = events.iter().filter_map(|event| event["args"]["name"].as_str()).collect();
    assert_eq!(names, ["./a \"b\" (42)", "thread 43", "device 1, stream 7", "kedge"]);
    assert_eq!(merged.table.of(Kind::Kernel)[0].1.total, 1500);
}

#[test]
fn a_limit_is_kept_and_what_is_left_out_is_counted() {
    let folder = Folder::new("limit");
    let limit = RESERVE + 1000;
    let mut writer = Writer::create(&folder.0, limit, 1, "a").unwrap();
    for begin in 0..100 {
        writer.span(span(Kind::Kernel, &"k".repeat(2 * MAX_NAME_LEN), begin));
        writer.span(span(Kind::Kernel, "short", begin));
        writer.flush();
    }
    writer.lose(5);
    writer.close();
    let path = folder.0.join(format!("{}.jsonl", std::process::id()));
    assert!(fs::metadata(path).unwrap().len() <= limit);
    let (merged, trace) = folder.merged(limit);
    assert_eq!((merged.left, merged.lost), (200, 5), "each is there or counted");
    assert_eq!((merged.spans, merged.damaged), (0, 0), "nothing comes after the first left out");
    assert_eq!(
        (&trace["otherData"]["left_out"], &trace["otherData"]["lost"]),
        (&200.into(), &5.into())
    );

    let mut writer = Writer::create(&folder.0, limit, 1, "a").unwrap();
    (0..100).for_each(|begin| writer.span(span(Kind::Kernel, "short", begin)));
    writer.close();
    let (merged, _) = folder.merged(limit);
    assert!(merged.spans > 5 && merged.left > 5 && merged.spans + merged.left == 100);
}

/// What did not fit on a full disk is told all the same: that takes no more bytes, and it is no
/// matter how the last line was cut.
#[test]
fn what_is_left_out_is_told_without_room() {
    let folder = Folder::new("full");
    let mut writer = Writer::create(&folder.0, 1 << 20, 1, "a").unwrap();
    writer.span(span(Kind::Kernel, "k", 0));
    writer.flush();
    writer.file.write_all(b"{\"kind\":\"kern").unwrap();
    (writer.left, writer.lost) = (u64::MAX, u64::MAX - 1);
    let path = folder.0.join(format!("{}.jsonl", std::process::id()));
    let before = fs::metadata(&path).unwrap().len();
    writer.close();
    assert_eq!(fs::metadata(&path).unwrap().len(), before);
    let (merged, _) = folder.merged(1 << 20);
    assert_eq!((merged.spans, merged.damaged), (1, 1));
    assert_eq!((merged.left, merged.lost), (u64::MAX, u64::MAX - 1));
}

#[test]
fn files_of_others_hide_nothing() {
    let folder = Folder::new("hostile");
    let mut writer = Writer::create(&folder.0, 1 << 20, 1, "a").unwrap();
    writer.span(span(Kind::Kernel, "k", 0));
    writer.close();
    let named = |name: &str| folder.0.join(name);
    let own = format!("{}.jsonl", std::process::id());
    std::os::unix::fs::symlink(own, named("0.jsonl")).unwrap();
    let made = std::process::Command::new("mkfifo").arg(named("1.jsonl")).status().unwrap();
    assert!(made.success());
    let huge = u64::MAX;
    let wild = format!(
        "{{\"kind\":\"kernel\",\"name\":\"\\u0000\",\"begin\":{huge},\"end\":0,\"lane\":{huge},\"device\":9999}}\n\
         {{\"left\":{huge}}}\n{{\"left\":{huge}}}\n\n{{\"kind\":\"call\",\"name\":7}}\n{}\n\u{fffd}",
        "x".repeat(2 * MAX_LINE_LEN)
    );
    fs::write(named("2.jsonl"), wild).unwrap();
    let (merged, trace) = folder.merged(1 << 20);
    assert_eq!((merged.spans, merged.left, merged.damaged), (2, huge, 3));
    assert_eq!((merged.unread.len(), spans(&trace).len()), (2, 2), "{:?}", merged.unread);
    assert!(merge(&named("none"), &Wanted { file: None, limit: 1 }).is_err());
    let file = Some(named("none/t.json"));
    assert!(merge(&folder.0, &Wanted { file, limit: 1 }).is_err_and(|why| why.contains("t.json")));
}
