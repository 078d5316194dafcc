//! What work on host memory costs, against PyTorch, DeepSpeed and the limit that memory sets; and what tensors on a disk do,
//! against fio.
//!
//! The contenders of a task take turns within each round, so that whatever else the machine does hits all of them. A time
//! is the median of the rounds, a ratio the median of the rounds' ratios. `--only optimizer` or `store`
//! measures one part.
//!
//! The peers are run by the Python that the variable `PYTHON` names, `python3` without it. One that is not installed there
//! has rows without a value.

mod adamw;
mod limit;
mod optimizer;
mod peer;
mod samples;
mod store;

use std::error::Error;
use std::path::PathBuf;

use serde_json::Value;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let option = |name: &str| arguments.iter().skip_while(|argument| *argument != name).nth(1);
    let wants = |part: &str| option("--only").is_none_or(|only| only == part);
    let mut rows = Vec::new();
    if wants("optimizer") {
        rows.extend(optimizer::rows()?);
    }
    if wants("store") {
        rows.extend(store::rows()?);
    }
    let rows = Value::Array(rows);
    match option("--rows").map(PathBuf::from) {
        Some(path) => std::fs::write(&path, rows.to_string())
            .map_err(|error| format!("cannot write the rows to {}: {error}", path.display()).into()),
        None => {
            println!("{rows:#}");
            Ok(())
        }
    }
}
