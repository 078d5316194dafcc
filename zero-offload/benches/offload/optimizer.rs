//! Rows of the optimizers.

use std::cell::RefCell;
use std::error::Error;

use serde_json::Value;

use crate::adamw::{AdamW, Task};
use crate::limit::Limit;
use crate::peer::Peer;
use crate::samples::{Contender, Samples, judged, told};

/// No power of two: buffers of 128 MiB lie 128 MiB and a page apart, which AMD's first cache takes for the same place.
const ELEMENTS: usize = 32_000_000;
const OURS: &str = "zero-offload";
const LIMIT: &str = "moving the same bytes";

/// A peer's name in its program and in rows.
const PEERS: [(&str, &str); 2] = [("torch", "PyTorch's fused AdamW"), ("deepspeed", "DeepSpeedCPUAdam")];

/// DeepSpeed's update in bf16 without masters moves 22 bytes for an element, where 28 are moved with them. Another job: told,
/// not judged.
const WITHOUT_MASTERS: &str = "DeepSpeedCPUAdam without masters";

pub(crate) fn rows() -> Result<Vec<Value>, Box<dyn Error>> {
    let ours = RefCell::new(AdamW::new(ELEMENTS)?);
    let threads = ours.borrow().workers().threads();
    let limit = RefCell::new(Limit::new(ELEMENTS, threads));
    eprintln!("{:?}", ours.borrow().workers());
    let start = |(program, name): (&'static str, &'static str)| match Peer::start(program, ELEMENTS, threads)
    {
        Ok(peer) => Some((name, RefCell::new(peer))),
        Err(error) => {
            eprintln!("without {name}: {error}");
            None
        }
    };
    let peers: Vec<_> = PEERS.into_iter().filter_map(start).collect();

    let mut rows = Vec::new();
    for task in Task::ALL {
        let mut contenders: Vec<Contender<'_>> = vec![
            (OURS, Box::new(|| ours.borrow_mut().seconds(task))),
            (LIMIT, Box::new(|| Ok(limit.borrow_mut().seconds(task)))),
        ];
        for (name, peer) in &peers {
            contenders.push((name, Box::new(|| peer.borrow_mut().seconds(task.name))));
            if task.name == "bf16" && *name == PEERS[1].1 {
                contenders.push((WITHOUT_MASTERS, Box::new(|| peer.borrow_mut().seconds("bf16-only"))));
            }
        }
        rows.extend(rows_of(task, &Samples::take(task.name, contenders)?));
    }
    Ok(rows)
}

fn rows_of(task: Task, samples: &Samples) -> Vec<Value> {
    let Task { name, whole, .. } = task;
    let mut names = vec![OURS, LIMIT, PEERS[0].1, PEERS[1].1];
    if name == "bf16" {
        names.push(WITHOUT_MASTERS);
    }
    let mut rows = Vec::new();
    for who in &names {
        let seconds = samples.seconds(who);
        rows.push(told(format!("AdamW {name}, {who}"), seconds.map(|seconds| seconds * 1e3), "ms"));
    }
    let moved = (task.bytes() * ELEMENTS) as f64;
    let rate = samples.seconds(OURS).map(|seconds| moved / seconds / 1e9);
    rows.push(told(format!("AdamW {name}, {OURS}, bytes moved"), rate, "GB/s"));
    rows.push(judged(format!("AdamW {name}, share of the limit"), samples.ratio(LIMIT, OURS), "", 0.9));
    for who in &names[2..] {
        let (row, ratio) = (format!("AdamW {name}, speed against {who}"), samples.ratio(who, OURS));
        rows.push(match (*who, whole) {
            (WITHOUT_MASTERS, _) => told(row, ratio, "x"),
            (_, true) => judged(row, ratio, "x", 1.3),
            (_, false) => judged(row, ratio, "x", 1.0),
        });
    }
    rows
}
