//! The trace of a run.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use serde_json::Value;

use common::{folder, train};

const ACTIVITIES: [&str; 4] = ["compute", "gather", "reduce", "update"];

/// One complete event; times in nanoseconds.
struct Span {
    pid: u64,
    tid: u64,
    category: String,
    name: String,
    start: u64,
    end: u64,
    bytes: u64,
}

struct Trace {
    spans: Vec<Span>,
    /// Names by process.
    processes: BTreeMap<u64, String>,
    /// Processes and names by thread.
    rows: BTreeMap<u64, (u64, String)>,
}

/// Reads a file of the trace event format, in which nothing but what is known may be.
fn read(text: &str) -> Trace {
    let file: Value = serde_json::from_str(text).unwrap();
    let mut trace = Trace { spans: vec![], processes: BTreeMap::new(), rows: BTreeMap::new() };
    let mut sorted = BTreeSet::new();
    for event in file["traceEvents"].as_array().unwrap() {
        let number = |key: &str| event[key].as_u64().unwrap();
        let nanos = |key: &str| (event[key].as_f64().unwrap() * 1e3).round() as u64;
        let (pid, tid) = (number("pid"), number("tid"));
        let name = event["name"].as_str().unwrap();
        match (event["ph"].as_str().unwrap(), name) {
            ("M", "process_name") => {
                trace.processes.insert(pid, event["args"]["name"].as_str().unwrap().to_owned());
            }
            ("M", "thread_name") => {
                let name = event["args"]["name"].as_str().unwrap().to_owned();
                assert_eq!(trace.rows.insert(tid, (pid, name)), None, "one thread is in two processes");
            }
            ("M", "thread_sort_index") => assert!(sorted.insert((pid, event["args"]["sort_index"].as_u64()))),
            ("M", "process_sort_index") => assert_eq!(event["args"]["sort_index"], pid - 1),
            ("X", _) => trace.spans.push(Span {
                pid,
                tid,
                category: event["cat"].as_str().unwrap().to_owned(),
                name: name.to_owned(),
                start: nanos("ts"),
                end: nanos("ts") + nanos("dur"),
                bytes: event["args"]["bytes"].as_u64().unwrap(),
            }),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(sorted.len(), trace.rows.len());
    trace
}

/// Every span lies in a row of its kind and rank, and rows have no spans that overlap.
fn check_rows(trace: &Trace, ranks: u64) {
    let processes: Vec<_> = trace.processes.values().cloned().collect();
    assert_eq!(processes, (0..ranks).map(|rank| format!("rank {rank}")).collect::<Vec<_>>());
    let mut ends = BTreeMap::new();
    let mut spans: Vec<_> = trace.spans.iter().collect();
    spans.sort_by_key(|span| (span.start, span.end));
    assert_eq!(spans[0].start, 0);
    for span in spans {
        let (pid, name) = &trace.rows[&span.tid];
        assert_eq!((*pid, name.split(' ').next().unwrap()), (span.pid, span.category.as_str()));
        let end = ends.insert(span.tid, span.end).unwrap_or(0);
        assert!(end <= span.start, "{} begins in {} before another ends", span.name, name);
    }
}

/// Runs with a trace, and gives it with the metrics.
fn run(more: &str, arguments: &[&str]) -> (Trace, Vec<Value>) {
    let folder = folder();
    let path = folder.path().join("tiny.toml");
    // Four rows, so that both ranks do the same.
    let tiny = fs::read_to_string(&path).unwrap().replace("batch = 5", "batch = 4");
    fs::write(path, tiny + more).unwrap();
    fs::write(folder.path().join("trace.json"), "an older one").unwrap();
    let (metrics, _) = train(&folder, &[arguments, &["--trace", "trace.json"]].concat());
    let trace = fs::read_to_string(folder.path().join("trace.json")).unwrap();
    let names: Vec<_> = fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert!(names.iter().all(|name| !name.starts_with('.')), "{names:?}");
    (read(&trace), metrics)
}

#[test]
fn each_rank_has_four_rows_and_every_byte_of_the_statistics() {
    let (trace, metrics) = run(
        "[zero]\npersistence_threshold = 0\noverlap = false\n",
        &["--stage", "3", "--ranks", "2", "--accumulation", "2"],
    );
    check_rows(&trace, 2);
    let rows: Vec<_> = trace.rows.values().map(|(pid, name)| (*pid, name.as_str())).collect();
    let expected: Vec<_> = [1, 2].iter().flat_map(|&pid| ACTIVITIES.map(|name| (pid, name))).collect();
    assert_eq!(rows, expected);
    for pid in [1, 2] {
        let spans = || trace.spans.iter().filter(|span| span.pid == pid);
        let count = |name: &str| spans().filter(|span| span.name == name).count();
        let steps = metrics.len();
        assert_eq!(["forward", "backward", "step", "evaluate"].map(count), [2 * steps, 2 * steps, steps, 1]);
        // What comes after the last step is in nobody's statistics.
        let trained = spans().find(|span| span.name == "evaluate").unwrap().start;
        for (category, key) in [("gather", "gathered_bytes"), ("reduce", "reduced_bytes")] {
            let of_kind = spans().filter(|span| span.category == category && span.start < trained);
            let counted: u64 = metrics.iter().map(|record| record[key].as_u64().unwrap()).sum();
            assert!(counted > 0);
            assert_eq!(of_kind.map(|span| span.bytes).sum::<u64>(), counted, "{key} of process {pid}");
        }
        // Without overlap, what a forward needs is gathered while it runs.
        let first = spans().find(|span| span.name == "forward").unwrap();
        let within = spans()
            .filter(|span| span.category == "gather" && span.start >= first.start && span.end <= first.end);
        assert!(within.count() > 0);
    }
}

#[test]
fn communication_beside_compute_never_overlaps_in_a_row() {
    for (stage, ranks) in [("0", 1), ("1", 2), ("2", 3), ("3", 3)] {
        let arguments = ["--stage", stage, "--ranks", &ranks.to_string()];
        let (trace, _) = run("", &arguments);
        check_rows(&trace, ranks);
        assert!(trace.rows.len() >= 4 * ranks as usize);
    }
    let (trace, _) = run("[zero]\npersistence_threshold = 0\n", &["--ranks", "2"]);
    check_rows(&trace, 2);
}

#[test]
fn processes_trace_by_one_clock() {
    let (trace, _) = run("", &["--ranks", "3", "--processes"]);
    check_rows(&trace, 3);
    // No rank can begin its last forward before all have ended their first backward; several steps lie between, and a
    // comparison of clocks is off by less than one.
    let of = |pid: u64, name: &str, nth: usize| {
        let mut spans: Vec<_> =
            trace.spans.iter().filter(|span| span.pid == pid && span.name == name).collect();
        spans.sort_by_key(|span| span.start);
        (spans[nth].start, spans[nth].end)
    };
    for (early, late) in (1..=3).flat_map(|early| (1..=3).map(move |late| (early, late))) {
        assert!(of(early, "backward", 0).1 <= of(late, "forward", 3).0, "{early} and {late}");
    }
}
