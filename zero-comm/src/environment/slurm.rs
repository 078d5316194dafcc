//! What Slurm tells a process: its place in a job step, and where the step's ranks can meet.

use super::claim::{COUNT, Claim, INDEX};
use super::error::EnvironmentError;
use super::launch::Launcher;
use super::node_list::expand_node_list;
use super::variables::Variables;

/// From here on, step ids are no ids: they stand for the batch script, the interactive shell and the like.
const FIRST_SPECIAL_STEP: u32 = 0xffff_fff0;

/// Where the ports of job steps begin, and how many there are: below what systems give out by themselves.
const PORTS: (u64, u64) = (15_000, 10_000);

/// This process as a task of a job step; `None` outside of one.
///
/// Only `srun` makes steps. The batch script and the shell of `salloc` also find `SLURM_NTASKS` and even
/// `SLURM_PROCID=0`, but they run once, whatever the number of tasks: an allocation is no launch.
pub(super) fn step(variables: &Variables) -> Result<Option<Claim>, EnvironmentError> {
    let Some(id) = step_id(variables)? else { return Ok(None) };
    let tasks = ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"];
    let [of_step, of_job] = [variables.number::<usize>(tasks[0], COUNT)?, variables.number(tasks[1], COUNT)?];
    // In a step both are the number of its tasks. They differ where `sbatch` was called from within a step: the
    // new job's script inherits the old step's variables and gets its own job's.
    let inherited = of_step.is_some() && of_job.is_some() && of_step != of_job;
    if id >= FIRST_SPECIAL_STEP || inherited {
        return Ok(None);
    }
    if !variables.has("SLURM_JOB_ID") {
        return Err(variables.partial(vec!["SLURM_JOB_ID"]));
    }
    let size = variables.first(&tasks).unwrap_or(tasks[0]);
    let local_size = local_size(variables, of_step.or(of_job))?;
    Claim::checked(variables, Launcher::Slurm, ["SLURM_PROCID", size, "SLURM_LOCALID"], local_size).map(Some)
}

/// How many tasks the allocation is for that this process stands in, outside of any step; `None` if it does not
/// tell, or there is none.
pub(super) fn tasks_of_allocation(variables: &Variables) -> Result<Option<usize>, EnvironmentError> {
    if variables.has("SLURM_JOB_ID") { variables.number("SLURM_NTASKS", COUNT) } else { Ok(None) }
}

/// What a task's variables lack that are there without a job; `None` if none are there.
///
/// The variables of a daemon, like `SLURM_LOCALID` alone, name no task.
pub(super) fn missing_of_task(variables: &Variables) -> Option<Vec<&'static str>> {
    let names_task = variables.has("SLURM_PROCID") || variables.has("SLURM_NTASKS");
    let missing = || ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"];
    (names_task && !variables.has("SLURM_JOB_ID"))
        .then(|| missing().into_iter().filter(|name| !variables.has(name)).collect())
}

/// What tells this step from all others, those of its job's earlier runs included.
pub(super) fn job(variables: &Variables) -> Result<String, EnvironmentError> {
    let restart = restart(variables)?;
    Ok(format!("{}.{}.{restart}", job_id(variables)?, step_id(variables)?.unwrap_or_default()))
}

/// How often the job was started again.
pub(super) fn restart(variables: &Variables) -> Result<u32, EnvironmentError> {
    Ok(variables.number("SLURM_RESTART_COUNT", INDEX)?.unwrap_or_default())
}

/// The host of rank 0, which is the step's first, and a port there that follows from the ids of job and step:
/// 15000 to 24999, by the last four digits of their sum.
pub(super) fn meeting_place(variables: &Variables) -> Result<(String, u16), EnvironmentError> {
    let lists = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"];
    let Some(name) = variables.first(&lists) else { return Err(variables.partial(vec![lists[1]])) };
    let nodes = expand_node_list(variables.get(name).unwrap_or_default())
        .map_err(|error| variables.malformed(name, format!("a list of hosts ({})", error.reason)))?;
    let step = u64::from(step_id(variables)?.unwrap_or_default());
    let offset = job_id(variables)?.wrapping_add(step) % PORTS.1;
    // The sum is less than 25,000, and no list expands to nothing.
    let port = u16::try_from(PORTS.0 + offset).unwrap_or_default();
    Ok((nodes.into_iter().next().unwrap_or_default(), port))
}

fn step_id(variables: &Variables) -> Result<Option<u32>, EnvironmentError> {
    variables.number("SLURM_STEP_ID", INDEX)
}

fn job_id(variables: &Variables) -> Result<u64, EnvironmentError> {
    Ok(variables.number("SLURM_JOB_ID", INDEX)?.unwrap_or_default())
}

/// How many of the step's tasks run on this host, and which variable tells; `None` if none does.
///
/// `SLURM_NTASKS_PER_NODE` is not asked: it is what the job was submitted with, not what the step has.
fn local_size(
    variables: &Variables,
    tasks: Option<usize>,
) -> Result<Option<(&'static str, usize)>, EnvironmentError> {
    let Some(name) = variables.first(&["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"]) else {
        return Ok(None);
    };
    let counts = tasks_per_node(variables.get(name).unwrap_or_default())
        .ok_or_else(|| variables.malformed(name, "a list of tasks per host such as 4(x2),1"))?;
    if let Some(tasks) = tasks {
        let sum = counts.iter().fold(0_usize, |sum, count| sum.saturating_add(*count));
        if sum != tasks {
            return Err(
                variables.contradiction(format!("the tasks of {name} add up to {sum}, not to {tasks}"))
            );
        }
    }
    let Some(node) = variables.number::<usize>("SLURM_NODEID", INDEX)? else { return Ok(None) };
    match counts.get(node) {
        Some(count) => Ok(Some((name, *count))),
        None => {
            let hosts = counts.len();
            Err(variables.contradiction(format!("SLURM_NODEID={node}, but {name} has {hosts} hosts")))
        }
    }
}

/// Expands `4(x2),1` to 4, 4, 1; `None` if it is not of this form, or too long to be a list of hosts.
fn tasks_per_node(list: &str) -> Option<Vec<usize>> {
    let number = |text: &str| {
        if text.bytes().all(|byte| byte.is_ascii_digit()) { text.parse::<usize>().ok() } else { None }
    };
    let mut counts = Vec::new();
    for item in list.split(',') {
        let (count, times) = match item.split_once("(x") {
            Some((count, times)) => (number(count)?, number(times.strip_suffix(')')?)?),
            None => (number(item)?, 1),
        };
        if times == 0 || times > super::node_list::MAX_NODES - counts.len() {
            return None;
        }
        counts.resize(counts.len() + times, count);
    }
    Some(counts)
}

#[cfg(test)]
mod tests {
    use super::tasks_per_node;

    #[test]
    fn counts_of_tasks_are_expanded() {
        for (list, counts) in
            [("1", vec![1]), ("4(x2),1", vec![4, 4, 1]), ("2,3(x1),0(x3)", vec![2, 3, 0, 0, 0])]
        {
            assert_eq!(tasks_per_node(list), Some(counts), "{list}");
        }
        assert_eq!(tasks_per_node("8(x65536)").map(|counts| counts.len()), Some(65_536));
    }

    #[test]
    fn what_counts_no_tasks_is_refused() {
        for list in [
            "",
            ",",
            "4,",
            "4(x2",
            "4(x)",
            "4(2)",
            "(x2)",
            "x2",
            "4(x2)1",
            "-4",
            "+4",
            "4(x+2)",
            "4(x0)",
            " 4",
            "4(x65537)",
            "1,1(x65536)",
            "99999999999999999999",
            "4(x99999999999999999999)",
        ] {
            assert_eq!(tasks_per_node(list), None, "{list}");
        }
    }
}
