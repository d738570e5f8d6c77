//! `kedge check`: each kind of mistake is found at its line, and correct programs are not
//! complained of.
use kedge_tests::world::{World, stderr};
use kedge_tests::{host, root};
use serde_json::Value;
use std::process::Output;

/// What checking a case of checked.cu gives: how kedge ended, and its report.
fn check(case: &str, options: &[&str]) -> (Output, Value) {
    let world = World::new(&format!("check-{case}"));
    let program = host("checked.cu", "checked", &["-arch=sm_90", "-lineinfo"]);
    let (program, file) = (program.display().to_string(), world.0.join("found.json"));
    let json = format!("--json={}", file.display());
    let words = [&["check", &json], options, &["--", &program, case]].concat();
    let output = world.output(&words);
    let text = std::fs::read(&file).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    (output, serde_json::from_slice(&text).expect("JSON"))
}

/// The number of the line of checked.cu that has a comment.
fn line_of(comment: &str) -> u64 {
    let source = std::fs::read_to_string(root().join("tests/hosts/checked.cu")).expect("a file");
    let ends = |line: &str| line.ends_with(&format!("// {comment}"));
    1 + source.lines().position(ends).unwrap_or_else(|| panic!("{comment}: no such line")) as u64
}

/// The one finding of a case, of this kind, at the line with the case's name, with these words.
fn finds(case: &str, options: &[&str], kind: &str, words: &[&str]) -> Value {
    let (output, report) = check(case, options);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(86), "{case}: {said}");
    assert_eq!(report["format"], 1);
    let findings = report["findings"].as_array().expect("a list");
    assert_eq!(findings.len(), 1, "{case}: {said}");
    let found = findings[0].clone();
    assert_eq!(found["kind"], kind, "{said}");
    // Headers' functions are inlined.
    let inlined_at = found["inlined_at"].as_array();
    let (file, line) = match inlined_at.map(Vec::as_slice) {
        Some([file, line]) => (file, line),
        _ => (&found["file"], &found["line"]),
    };
    assert_eq!(line, line_of(case), "{said}");
    assert!(file.as_str().is_some_and(|file| file.ends_with("checked.cu")), "{found}");
    let message = found["message"].as_str().expect("text");
    for word in words {
        assert!(message.contains(word), "{case}: {word:?} is not in {message}");
    }
    assert!(said.contains(message) && said.ends_with("kedge: check: 1 finding\n"), "{said}");
    found
}

fn finds_nothing(case: &str, options: &[&str]) {
    let (output, report) = check(case, options);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(0), "{case}: {said}");
    assert_eq!(report["findings"].as_array().map(Vec::len), Some(0), "{case}: {report}");
    assert_eq!(said, "kedge: check: nothing was found\n", "{case}");
}

#[test]
fn accesses_beyond_memory_are_found() {
    let past = "0 bytes past the end of the 4004 bytes allocated";
    let found = finds("past_the_end", &[], "memory", &["past_the_end(int*, int)", past]);
    let thread = [1001 % 128, 0, 0];
    assert_eq!(found["thread"], Value::from(thread.to_vec()));
    assert_eq!(found["block"], Value::from(vec![1001 / 128, 0, 0]));
    assert_eq!(found["action"], "write of 4 bytes");
    finds("misaligned", &[], "memory", &["misaligned address", "offset 1 in the 64 bytes"]);
    finds("freed", &[], "memory", &["freed(int*)", "write of 4 bytes"]);
    finds("local", &[], "memory", &["64 bytes of local memory"]);
}

/// What a launch asks for of shared memory is less than it gets on a device.
#[test]
fn shared_memory_ends_where_the_launch_says() {
    finds("dynamic_shared", &[], "memory", &["offset 100 in 100 bytes of shared memory"]);
}

#[test]
fn races_in_a_block_and_in_a_warp_are_found() {
    for case in ["block_race", "warp_race"] {
        let found = finds(case, &["--races"], "race", &["race in shared memory"]);
        let other = &found["other"];
        assert_eq!(other["line"], line_of(&format!("{case}_write")), "{found}");
        assert_eq!(
            (&found["action"], &other["action"]),
            (&"read of 4 bytes".into(), &"write".into())
        );
        assert_ne!(found["thread"], other["thread"]);
    }
    let found = finds("two_writers", &["--races"], "race", &["race in shared memory"]);
    assert_eq!(found["other"]["line"], line_of("two_writers"));
    let (_, report) = check("next_round", &["--races"]);
    let lines = |found: &Value| [found["line"].as_u64(), found["other"]["line"].as_u64()];
    let [read, write] = [line_of("next_round"), line_of("next_round_write")].map(Some);
    let findings = report["findings"].as_array().expect("a list");
    assert!(!findings.is_empty());
    for found in findings {
        let lines = lines(found);
        assert!(lines == [read, write] || lines == [write, read], "{found}");
    }
}

#[test]
fn what_is_ordered_is_no_race() {
    finds_nothing("no_race", &["--races", "--init"]);
    finds_nothing("block_race", &[]);
}

#[test]
fn reads_of_what_nobody_wrote_are_found() {
    let case = "memset_error";
    let (output, report) = check(case, &["--init"]);
    assert_eq!(output.status.code(), Some(86), "{}", stderr(&output));
    let found = &report["findings"][0];
    assert_eq!(report["findings"].as_array().map(Vec::len), Some(1), "{report}");
    assert_eq!(
        (&found["kind"], &found["line"]),
        (&"uninitialised".into(), &line_of("adds").into())
    );
    assert_eq!(found["count"], 750);
    finds(
        "unwritten_shared",
        &["--init"],
        "uninitialised",
        &["uninitialised shared memory at offset"],
    );
    finds_nothing("all_written", &["--init"]);
    finds_nothing(case, &["--races"]);
}

#[test]
fn memory_that_nobody_uses_is_found() {
    let (output, report) = check("unused", &["--unused"]);
    assert_eq!(output.status.code(), Some(86), "{}", stderr(&output));
    let findings = report["findings"].as_array().expect("a list");
    assert_eq!(findings.len(), 1, "{report}");
    assert_eq!(findings[0]["kind"], "unused");
    assert!(findings[0]["message"].as_str().is_some_and(|text| text.contains("12345 bytes")));
    finds_nothing("unused", &["--init"]);
    finds_nothing("no_race", &["--unused"]);
}

#[test]
fn barriers_that_threads_do_not_meet_at_are_found() {
    let (output, report) = check("divergent", &[]);
    assert_eq!(output.status.code(), Some(86), "{}", stderr(&output));
    let found = &report["findings"][0];
    assert_eq!(found["kind"], "barrier", "{report}");
    let mut lines = [&found["line"], &found["other"]["line"]].map(|line| line.as_u64());
    lines.sort_unstable();
    assert_eq!(lines, [line_of("divergent"), line_of("divergent_other")].map(Some));
    finds("stuck", &[], "barrier", &["deadlock"]);
    finds("illegal_syncwarp", &[], "barrier", &["0xffff0000"]);
}

/// The program's own status is kedge's where nothing is found, and its words are its own.
#[test]
fn a_program_without_mistakes_ends_as_it_does() {
    let world = World::new("check-own");
    let output = world.output(&["check", "--json", "--", "sh", "-c", "echo mine; exit 7"]);
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    let said = String::from_utf8(output.stdout).expect("UTF-8");
    let json = said.strip_prefix("mine\n").expect("its own words first");
    let report: Value = serde_json::from_str(json).expect("JSON");
    assert_eq!(report["findings"], Value::Array(Vec::new()));
    let refused = world.output(&["check", "--gpu", "local", "--", "true"]);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    assert!(stderr(&refused).contains("only software devices check programs"));
}

/// What a program leaves among the findings neither holds kedge up nor hides what was found; and
/// where not all can be read, nobody is told that nothing was found, however the program ended.
#[test]
fn files_that_cannot_be_read_hide_nothing() {
    let world = World::new("check-unread");
    let program = host("checked.cu", "checked", &["-arch=sm_90", "-lineinfo"]);
    let program = program.display().to_string();
    let found = format!("exec {program} past_the_end");
    for (then, code) in [("exit 0", 125), ("exit 7", 125), (&*found, 86)] {
        let script = format!("mkfifo \"${{KEDGE_LOG%/log}}/findings/1.json\"; {then}");
        let output = world.output(&["check", "--", "sh", "-c", &script]);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{then}: {said}");
        let incomplete = "nothing was found, but not everything was looked at";
        assert_eq!(said.contains(incomplete), code == 125, "{then}: {said}");
    }
}
