//! What ranks did when, as a file that chrome://tracing and Perfetto open.

use std::fs::Permissions;
use std::io::{BufWriter, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tempfile::NamedTempFile;
use zero_burn::{Activity, CommunicatorExt, Zero};

/// Times that ranks look at their clocks together: a rank that the system wakes late does so a few times, not mostly.
const LOOKS: usize = 15;

/// Thread numbers are unique over all processes, because viewers tell threads apart by them alone in places.
const ROWS_PER_RANK: usize = 10_000;

/// Where a trace will be: an unfinished file beside it until then.
#[derive(Debug)]
pub struct TraceFile {
    path: PathBuf,
    file: NamedTempFile,
}

impl TraceFile {
    /// Creates the unfinished file, so that a place that cannot be written to is known before the run.
    ///
    /// # Errors
    ///
    /// When it cannot be created, or `path` is a folder.
    pub fn create(path: &Path) -> Result<Self> {
        let failed = || format!("cannot write the trace to {}", path.display());
        ensure!(!path.is_dir(), "{}: it is a folder", failed());
        ensure!(path.is_file() || !path.exists(), "{}: it is a device or a pipe", failed());
        // The file behind a link, not the link, is replaced.
        let path = &path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let file = tempfile::Builder::new()
            .prefix(".gpt-trace-")
            // As for any file that a program creates.
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(folder)
            .with_context(failed)?;
        Ok(Self { path: path.to_owned(), file })
    }

    /// Writes the trace and gives the file its name.
    ///
    /// # Errors
    ///
    /// When either fails; a file that was there before is as it was.
    pub fn finish(mut self, timeline: &Timeline) -> Result<()> {
        let failed = || format!("cannot write the trace to {}", self.path.display());
        let mut writer = BufWriter::new(&mut self.file);
        serde_json::to_writer(&mut writer, &timeline.to_json()).with_context(failed)?;
        writer.flush().with_context(failed)?;
        drop(writer);
        self.file.persist(&self.path).map_err(|error| error.error).with_context(failed)?;
        Ok(())
    }
}

/// What happened on one rank between two points in time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Span {
    /// By place in [`Activity::ALL`].
    activity: usize,
    name: String,
    /// Nanoseconds, after an origin that all spans of a timeline share.
    start: i64,
    nanos: i64,
    bytes: u64,
}

impl Span {
    fn end(&self) -> i64 {
        self.start.saturating_add(self.nanos)
    }
}

/// What happened on all ranks, by one clock.
#[derive(Clone, Debug)]
pub struct Timeline {
    /// By rank.
    ranks: Vec<Vec<Span>>,
}

impl Timeline {
    /// Takes the events of all ranks' engines. Collective; every rank gets all of them.
    ///
    /// # Errors
    ///
    /// When another rank fails.
    pub fn collect(zero: &Zero) -> Result<Self> {
        let comm = zero.communicator();
        let nanos = |time: Duration| i64::try_from(time.as_nanos()).unwrap_or(i64::MAX);
        let spans: Vec<_> = zero
            .take_trace()?
            .into_iter()
            .map(|event| Span {
                activity: event.activity as usize,
                name: event.name,
                start: nanos(event.start),
                nanos: nanos(event.duration),
                bytes: event.bytes,
            })
            .collect();
        let mut looks = [0; LOOKS];
        for look in &mut looks {
            comm.barrier("clocks of a trace")?;
            *look = nanos(zero.trace_clock()?);
        }
        let mut all = vec![0; LOOKS * comm.world_size().get()];
        comm.all_gather(&looks, &mut all, "clocks of a trace")?;
        let ranks = comm
            .all_gather_bytes(&serde_json::to_vec(&spans)?, "trace")?
            .iter()
            .zip(shifts(&all))
            .map(|(bytes, shift)| {
                let mut spans: Vec<Span> = serde_json::from_slice(bytes).map_err(|error| {
                    anyhow!("another rank sent no trace: {error}; run one program everywhere")
                })?;
                spans.iter_mut().for_each(|span| span.start = span.start.saturating_add(shift));
                Ok(spans)
            })
            .collect::<Result<_>>()?;
        Ok(Self { ranks })
    }

    /// The trace event format: one process per rank, with a row for each activity. Where a rank does the same twice at
    /// one time, such as to gather what is needed and what will be, there is another row for it.
    fn to_json(&self) -> Value {
        let first = self.ranks.iter().flatten().map(|span| span.start).min().unwrap_or(0);
        let micros = |nanos: i64| nanos as f64 / 1e3;
        let mut events = Vec::new();
        for (rank, spans) in self.ranks.iter().enumerate() {
            // Process 0 is none.
            let pid = rank + 1;
            let mut describe = |kind: &str, tid: usize, key: &str, value: Value| {
                events
                    .push(json!({ "ph": "M", "name": kind, "pid": pid, "tid": tid, "args": { key: value } }));
            };
            describe("process_name", 0, "name", json!(format!("rank {rank}")));
            describe("process_sort_index", 0, "sort_index", json!(rank));
            let rows = rows(spans);
            for (row, Row { name, .. }) in rows.iter().enumerate() {
                let tid = pid * ROWS_PER_RANK + row;
                describe("thread_name", tid, "name", json!(name));
                describe("thread_sort_index", tid, "sort_index", json!(row));
            }
            for (row, Row { spans, .. }) in rows.iter().enumerate() {
                events.extend(spans.iter().map(|span| {
                    json!({
                        "ph": "X",
                        "name": span.name,
                        "cat": Activity::ALL[span.activity].name(),
                        "pid": pid,
                        "tid": pid * ROWS_PER_RANK + row,
                        "ts": micros(span.start.saturating_sub(first)),
                        "dur": micros(span.nanos),
                        "args": { "bytes": span.bytes },
                    })
                }));
            }
        }
        json!({ "displayTimeUnit": "ms", "traceEvents": events })
    }
}

/// What to add to the times of each rank to have them by the clock of rank 0: each rank has [`LOOKS`] stamps, taken at
/// about the same times.
fn shifts(looks: &[i64]) -> Vec<i64> {
    let (root, _) = looks.split_at(LOOKS.min(looks.len()));
    looks
        .chunks(LOOKS)
        .map(|own| {
            let mut shifts: Vec<_> =
                root.iter().zip(own).map(|(root, own)| root.saturating_sub(*own)).collect();
            shifts.sort_unstable();
            shifts[shifts.len() / 2]
        })
        .collect()
}

/// Spans that do not overlap.
#[derive(Debug)]
struct Row<'a> {
    name: String,
    spans: Vec<&'a Span>,
}

/// One row for each activity, empty or not, and more where its spans overlap.
fn rows(spans: &[Span]) -> Vec<Row<'_>> {
    let mut all = Vec::new();
    for (activity, name) in Activity::ALL.iter().map(|activity| activity.name()).enumerate() {
        let mut rows = vec![Row { name: name.to_owned(), spans: Vec::new() }];
        let mut spans: Vec<_> = spans.iter().filter(|span| span.activity == activity).collect();
        spans.sort_by_key(|span| (span.start, span.end()));
        for span in spans {
            let is_free = |row: &&mut Row<'_>| row.spans.last().is_none_or(|last| last.end() <= span.start);
            match rows.iter_mut().find(is_free) {
                Some(row) => row.spans.push(span),
                None => {
                    let name = format!("{name} {}", rows.len() + 1);
                    rows.push(Row { name, spans: vec![span] });
                }
            }
        }
        all.append(&mut rows);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::{LOOKS, Span, Timeline, rows, shifts};

    fn span(activity: usize, start: i64, nanos: i64) -> Span {
        Span { activity, name: String::from("a"), start, nanos, bytes: 0 }
    }

    #[test]
    fn spans_that_overlap_have_rows_of_their_own() {
        let spans = [span(1, 20, 10), span(1, 0, 10), span(1, 5, 10), span(1, 10, 5), span(3, 0, 100)];
        let rows = rows(&spans);
        let found: Vec<_> = rows
            .iter()
            .map(|row| (row.name.as_str(), row.spans.iter().map(|span| span.start).collect::<Vec<_>>()))
            .collect();
        let expected = [
            ("compute", vec![]),
            ("gather", vec![0, 10, 20]),
            ("gather 2", vec![5]),
            ("reduce", vec![]),
            ("update", vec![0]),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_clock_is_compared_by_the_middle_of_all_looks() {
        let root: Vec<i64> = (0..LOOKS as i64).map(|look| 1000 * look).collect();
        let mut other: Vec<i64> = root.iter().map(|look| look - 70).collect();
        other[3] += 900_000;
        let shifts = shifts(&[root, other].concat());
        assert_eq!(shifts, [0, 70]);
    }

    #[test]
    fn times_begin_at_zero_and_are_microseconds() {
        let timeline = Timeline { ranks: vec![vec![span(0, 5_000, 1_500)], vec![span(0, 4_000, 1)]] };
        let json = timeline.to_json();
        let times: Vec<_> = json["traceEvents"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|event| event["ph"] == "X")
            .map(|event| {
                (
                    event["pid"].as_u64().unwrap(),
                    event["ts"].as_f64().unwrap(),
                    event["dur"].as_f64().unwrap(),
                )
            })
            .collect();
        assert_eq!(times, [(1, 1.0, 1.5), (2, 0.0, 0.001)]);
    }
}
