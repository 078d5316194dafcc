//! Reading a file: from its tree of values to a draft and a report.

use std::collections::{BTreeMap, BTreeSet};

use super::draft::Draft;
use super::key::{self, Auto, Key, OrElse, Rule, When};
use super::optimizer::OptimizerKind;
use super::scheduler::SchedulerKind;
use super::{
    BatchError, BatchPlan, DeepSpeedEntry, DeepSpeedGiven, DeepSpeedReport, DeepSpeedSource,
    DeepSpeedVerdict, keys,
};
use crate::Tier;
use crate::config::value::Value;

/// What is known about a file on the way through it.
pub(super) struct File<'a> {
    given: &'a DeepSpeedGiven,
    draft: Draft,
    report: DeepSpeedReport,
    /// The path in the file of each key seen, by its path of today.
    seen: BTreeMap<String, String>,
    /// Values to be taken, with the positions of their entries.
    taken: Vec<(usize, &'static Key, Value)>,
}

impl<'a> File<'a> {
    /// What the entries of a file say. There is no batch plan if the report refuses a key that it needs.
    pub(super) fn read(
        entries: Vec<(String, Value)>,
        given: &'a DeepSpeedGiven,
    ) -> (Draft, Option<Result<BatchPlan, BatchError>>, DeepSpeedReport) {
        // Where it is taken for a key, that says what is wrong with it.
        let given_lr = given.lr.filter(|lr| lr.is_finite() && *lr >= 0.0);
        let mut file = Self {
            given,
            draft: Draft { given_lr, ..Draft::default() },
            report: DeepSpeedReport::default(),
            seen: BTreeMap::new(),
            taken: Vec::new(),
        };
        file.table("", entries);
        let mentions = |table: &str| file.seen.keys().any(|key| key.starts_with(table));
        (file.draft.optimizer.present, file.draft.scheduler.present) =
            (mentions("optimizer."), mentions("scheduler."));
        file.take();
        file.take_given_rate();
        file.assume_defaults();
        let batch = file.plan_batch();
        for (key, verdict) in file.draft.together() {
            file.overrule(key, verdict);
        }
        (file.draft, batch, file.report)
    }

    /// The entries of the table at `prefix`, which is empty for the root.
    fn table(&mut self, prefix: &str, entries: Vec<(String, Value)>) {
        let mut names = BTreeSet::new();
        for (name, value) in entries {
            let path = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
            // A point in a name would make it the path of another key.
            let pointed = name.contains('.') && !key::is_open(&path);
            if !names.insert(name) {
                self.enter(path, &value, DeepSpeedVerdict::refused("given twice; keep one of the two"));
            } else if pointed {
                self.enter(path, &value, DeepSpeedVerdict::refused("unknown key; no name has a point"));
            } else {
                self.entry(path, value);
            }
        }
    }

    /// One key, or one table of keys.
    fn entry(&mut self, path: String, value: Value) {
        let current = key::renamed(&path);
        let is_table = key::is_table(&current);
        match (key::find(&current), value) {
            (Some(key), value) if key.name == current => self.key(path, current, key, value),
            (_, Value::Table(entries)) if is_table && !entries.is_empty() => self.table(&path, entries),
            (Some(key), value) => self.key(path, current, key, value),
            (None, value @ (Value::Table(_) | Value::Nothing)) if is_table => {
                self.enter(path, &value, DeepSpeedVerdict::without_effect("there is nothing in it"));
            }
            (None, Value::Bool(on)) if current == ZERO => {
                self.entry(format!("{ZERO}.stage"), Value::Integer(on.into()));
            }
            (None, value) => {
                let why = if is_table { "write an object".into() } else { key::unknown(&path) };
                self.enter(path, &value, DeepSpeedVerdict::refused(why));
            }
        }
    }

    /// A key that is known, by its path in the file and that of today.
    fn key(&mut self, path: String, current: String, key: &'static Key, value: Value) {
        if let Some(other) = self.seen.get(&current) {
            let why = format!("it is the same key as `{other}`; keep one of the two");
            return self.enter(path, &value, DeepSpeedVerdict::refused(why));
        }
        self.seen.insert(current, path.clone());
        let auto = value == Value::Text("auto".into());
        match key.rule {
            Rule::Taken { by, .. } if auto => self.auto(path, key, by),
            Rule::Taken { by, .. } => match key.wrong_type(&value) {
                Some(why) => self.enter(path, &value, DeepSpeedVerdict::refused(why)),
                None => self.keep(path, key, value, DeepSpeedSource::File, honoured(by)),
            },
            Rule::Off { values, .. } if auto || values.iter().any(|off| is(&value, &key::json(off))) => {
                self.enter(path, &value, DeepSpeedVerdict::without_effect("it is so in any case"));
            }
            Rule::Off { why, .. } => self.enter(path, &value, DeepSpeedVerdict::refused(why)),
            Rule::Switches(why) => {
                let off = auto || matches!(value, Value::Bool(false) | Value::Nothing);
                let verdict = if path.ends_with(".enabled") && !off {
                    DeepSpeedVerdict::refused(why)
                } else {
                    DeepSpeedVerdict::without_effect("it belongs to a part that is not enabled")
                };
                self.enter(path, &value, verdict);
            }
            Rule::Ignored(why) | Rule::Nearly(why) => {
                let verdict = match key.wrong_type(&value) {
                    Some(wrong) if !auto => DeepSpeedVerdict::refused(wrong),
                    _ if matches!(key.rule, Rule::Ignored(_)) => DeepSpeedVerdict::without_effect(why),
                    _ if auto || is(&value, &key.default()) => honoured("it is so in any case"),
                    _ => DeepSpeedVerdict::approximated(why),
                };
                self.enter(path, &value, verdict);
            }
        }
    }

    /// A key that leaves its value to what is given.
    fn auto(&mut self, path: String, key: &'static Key, by: &'static str) {
        if let Auto::Given { field, get, or } = key.auto {
            match (get(self.given), or) {
                (Some(value), _) => {
                    return self.keep(path, key, value, DeepSpeedSource::Given(field), honoured(by));
                }
                (None, OrElse::Default) => {}
                (None, OrElse::Division) => {
                    return self.keep(path, key, key.default(), DeepSpeedSource::Default, honoured(by));
                }
                (None, OrElse::Refusal) => {
                    let why = format!("set `{field}` of DeepSpeedGiven, or write the value");
                    return self.enter(path, &Value::Text("auto".into()), DeepSpeedVerdict::refused(why));
                }
            }
        }
        let verdict = DeepSpeedVerdict::approximated("\"auto\" is DeepSpeed's default");
        self.keep(path, key, key.default(), DeepSpeedSource::Default, verdict);
    }

    /// Enters a value that is still to be taken.
    fn keep(
        &mut self,
        path: String,
        key: &'static Key,
        value: Value,
        source: DeepSpeedSource,
        verdict: DeepSpeedVerdict,
    ) {
        self.enter(path, &value, verdict);
        if let Some(entry) = self.report.entries.last_mut() {
            entry.source = source;
        }
        self.taken.push((self.report.entries.len() - 1, key, value));
    }

    fn enter(&mut self, key: String, value: &Value, verdict: DeepSpeedVerdict) {
        let (value, source) = (value.to_string(), DeepSpeedSource::File);
        self.report.entries.push(DeepSpeedEntry { key, value, source, verdict });
    }

    /// Sets the values that count. Whether one counts can depend on others, which come first.
    fn take(&mut self) {
        let mut taken = std::mem::take(&mut self.taken);
        let turn = |key: &Key| match key.rule {
            Rule::Taken { when: When::Sharded | When::StageThree | When::Fp16, .. } => 1,
            Rule::Taken { when: When::Always | When::Present, .. } => 0,
            _ => 2,
        };
        taken.sort_by_key(|(_, key, _)| turn(key));
        for (entry, key, value) in taken {
            let Rule::Taken { when, set, .. } = key.rule else { continue };
            let verdict = match self.idle(when) {
                None => set(&mut self.draft, &value).err().map(DeepSpeedVerdict::refused),
                idle => idle,
            };
            if let (Some(verdict), Some(entry)) = (verdict, self.report.entries.get_mut(entry)) {
                entry.verdict = verdict;
            }
        }
    }

    /// Why a key does not count, unless it does.
    fn idle(&self, when: When) -> Option<DeepSpeedVerdict> {
        let draft = &self.draft;
        let without_effect = |why: &str| Some(DeepSpeedVerdict::without_effect(why));
        match when {
            When::Always | When::Present => None,
            When::Sharded if draft.stage.shards_optimizer() => None,
            When::Sharded => without_effect("the stage is 0"),
            When::StageThree if draft.stage.shards_parameters() => None,
            When::StageThree => without_effect("the stage is not 3"),
            When::Fp16 | When::DynamicScale if !draft.fp16 => without_effect("fp16 is not enabled"),
            When::DynamicScale if draft.loss_scale != 0.0 => without_effect("the loss scale is static"),
            When::Fp16 | When::DynamicScale => None,
            When::OptimizerOffloaded if draft.offload.optimizer(draft.stage) != Tier::Device => None,
            When::OptimizerOffloaded => without_effect("the optimizer's state is not offloaded"),
            When::OptimizerOnDisk if draft.offload.optimizer(draft.stage) == Tier::Nvme => None,
            When::OptimizerOnDisk => without_effect("the optimizer's state is not on a disk"),
            When::Optimizer(kinds) => belongs(draft.optimizer.kind, kinds, OptimizerKind::NAMES),
            When::Scheduler(kinds) => belongs(draft.scheduler.kind, kinds, SchedulerKind::NAMES),
        }
    }

    /// Takes the rate that a scheduler needs from what is given, if the file has no optimizer to take it from.
    fn take_given_rate(&mut self) {
        let name = match self.draft.scheduler.kind {
            Some(SchedulerKind::WarmupLr) => "scheduler.params.warmup_max_lr",
            Some(SchedulerKind::WarmupCosineLr) => "optimizer.params.lr",
            _ => return,
        };
        let (None, Some(lr)) = (self.draft.optimizer.kind, self.given.lr) else { return };
        if !self.seen.contains_key(name) {
            self.assume(name, &Value::Float(lr), DeepSpeedSource::Given("lr"));
        }
    }

    /// Takes what counts and the file does not say.
    fn assume_defaults(&mut self) {
        for key in keys::all() {
            let Rule::Taken { when, .. } = key.rule else { continue };
            let counts = when != When::Present && self.idle(when).is_none();
            if counts && !self.seen.contains_key(key.name) {
                self.assume(key.name, &key.default_beside(&self.draft), DeepSpeedSource::Default);
            }
        }
    }

    /// Takes and enters a value that is not the file's.
    fn assume(&mut self, name: &'static str, value: &Value, source: DeepSpeedSource) {
        let Some(Key { rule: Rule::Taken { by, set, .. }, .. }) = key::find(name) else { return };
        let verdict = set(&mut self.draft, value).map_or_else(DeepSpeedVerdict::refused, |()| honoured(by));
        self.seen.insert(name.to_owned(), name.to_owned());
        let (key, value) = (name.to_owned(), value.to_string());
        self.report.entries.push(DeepSpeedEntry { key, value, source, verdict });
    }

    /// Plans the batch, and enters what is wrong with it or follows from it; `None` if one of its keys is refused.
    fn plan_batch(&mut self) -> Option<Result<BatchPlan, BatchError>> {
        const TRAIN: &str = "train_batch_size";
        const MICRO: &str = "train_micro_batch_size_per_gpu";
        const STEPS: &str = "gradient_accumulation_steps";
        if self.report.refused().any(|(entry, _)| [TRAIN, MICRO, STEPS].contains(&entry.key.as_str())) {
            return None;
        }
        let Draft { train_batch_size, micro_batch_size, accumulation_steps, .. } = self.draft;
        let plan =
            BatchPlan::new(train_batch_size, micro_batch_size, accumulation_steps, self.given.world_size);
        match &plan {
            Ok(plan) => {
                for (name, number) in [
                    (TRAIN, plan.train_batch_size),
                    (MICRO, plan.micro_batch_size_per_rank),
                    (STEPS, plan.accumulation_steps),
                ] {
                    let followed = |entry: &&mut DeepSpeedEntry| {
                        entry.key == name && entry.source == DeepSpeedSource::Default
                    };
                    if let Some(entry) = self.report.entries.iter_mut().find(followed) {
                        entry.value = number.to_string();
                    }
                }
            }
            Err(BatchError::Zero { key }) => {
                self.overrule(key, DeepSpeedVerdict::refused("must be at least 1"));
            }
            Err(error) => self.overrule(TRAIN, DeepSpeedVerdict::refused(error.to_string())),
        }
        Some(plan)
    }

    /// Replaces the verdict on a key, which the file may not have, unless it is refused already.
    fn overrule(&mut self, key: &str, verdict: DeepSpeedVerdict) {
        let path = self.seen.get(key).map_or(key, String::as_str);
        match self.report.entries.iter_mut().find(|entry| entry.key == path) {
            Some(DeepSpeedEntry { verdict: DeepSpeedVerdict::Refused { .. }, .. }) => {}
            Some(entry) => entry.verdict = verdict,
            None => {
                let value = key::find(key).map_or(Value::Nothing, Key::default).to_string();
                let (key, source) = (path.to_owned(), DeepSpeedSource::Default);
                self.report.entries.push(DeepSpeedEntry { key, value, source, verdict });
            }
        }
    }
}

const ZERO: &str = "zero_optimization";

fn honoured(by: &str) -> DeepSpeedVerdict {
    DeepSpeedVerdict::Honoured { by: by.into() }
}

/// Why a parameter does not belong to the kind that the file chooses, unless it does.
fn belongs<K: PartialEq>(kind: Option<K>, kinds: &[K], names: &[(&str, K)]) -> Option<DeepSpeedVerdict> {
    let Some(kind) = kind else {
        return Some(DeepSpeedVerdict::without_effect("it belongs to no type"));
    };
    if kinds.contains(&kind) {
        return None;
    }
    let name = names.iter().find(|(_, other)| *other == kind).map_or("the type", |(name, _)| *name);
    Some(DeepSpeedVerdict::refused(format!("{name} has no such parameter; remove it")))
}

/// Whether two values are the same, `1` and `1.0` included.
fn is(value: &Value, other: &Value) -> bool {
    match (value, other) {
        (Value::Integer(integer), Value::Float(float)) | (Value::Float(float), Value::Integer(integer)) => {
            *float == *integer as f64
        }
        _ => value == other,
    }
}
