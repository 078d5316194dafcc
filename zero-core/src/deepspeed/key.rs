//! What is known of one key of a `ds_config.json`.

use super::draft::Draft;
use super::optimizer::OptimizerKind;
use super::scheduler::SchedulerKind;
use super::{DeepSpeedGiven, keys};
use crate::config::value::Value;
use crate::nearest;

/// One key, or with a name that ends in `.*` all keys of a table.
#[derive(Clone, Copy)]
pub(super) struct Key {
    /// Its path, with points.
    pub(super) name: &'static str,
    /// DeepSpeed's default as JSON, whose type is that of every value; `null` allows any.
    pub(super) default: &'static str,
    /// What becomes of it.
    pub(super) rule: Rule,
    /// What `"auto"` stands for.
    pub(super) auto: Auto,
    /// More about what becomes of it, for the documentation alone; often empty.
    pub(super) note: &'static str,
    /// The default where other keys make it another one than [`default`](Self::default).
    pub(super) own_default: fn(&Draft) -> Option<Value>,
}

/// What becomes of a key.
#[derive(Clone, Copy)]
pub(super) enum Rule {
    /// It is followed.
    Taken {
        /// The part of the import that holds the value, and nothing else.
        by: &'static str,
        /// When it counts.
        when: When,
        /// Takes the value, or says what is wrong with it.
        set: fn(&mut Draft, &Value) -> Result<(), String>,
    },
    /// It has no effect, whatever the value.
    Ignored(
        /// The reason.
        &'static str,
    ),
    /// The default is followed, any other value nearly.
    Nearly(
        /// What happens.
        &'static str,
    ),
    /// Only some values are followed, and those have no effect.
    Off {
        /// These values, as JSON.
        values: &'static [&'static str],
        /// Why others are refused, and what to do.
        why: &'static str,
    },
    /// Keys of a part that does not exist here: `enabled` must not be true, others have no effect.
    Switches(
        /// Why it must not, and what to do.
        &'static str,
    ),
}

/// When a key counts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum When {
    /// Always, with its default if the file does not have it.
    Always,
    /// As `Always`, at stages 1 to 3.
    Sharded,
    /// As `Always`, at stage 3.
    StageThree,
    /// As `Always`, if the optimizer's state is offloaded.
    OptimizerOffloaded,
    /// As `Always`, if the optimizer's state is on a disk.
    OptimizerOnDisk,
    /// As `Always`, if layers compute in f16.
    Fp16,
    /// As `Fp16`, if the loss scale is dynamic.
    DynamicScale,
    /// If the file has it.
    Present,
    /// As `Always` with these optimizers; with another one it is refused.
    Optimizer(&'static [OptimizerKind]),
    /// As `Always` with these schedulers; with another one it is refused.
    Scheduler(&'static [SchedulerKind]),
}

/// What `"auto"` stands for.
#[derive(Clone, Copy)]
pub(super) enum Auto {
    /// DeepSpeed's default.
    Default,
    /// A field of what is given.
    Given {
        /// The field.
        field: &'static str,
        /// Its value.
        get: fn(&DeepSpeedGiven) -> Option<Value>,
        /// What it stands for if that is not given.
        or: OrElse,
    },
}

/// What `"auto"` stands for if it is not given.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum OrElse {
    /// Nothing: it has to be given.
    Refusal,
    /// DeepSpeed's default.
    Default,
    /// What follows from the other batch keys, as if the file did not have it.
    Division,
}

impl Key {
    const fn new(name: &'static str, default: &'static str, rule: Rule) -> Self {
        Self { name, default, rule, auto: Auto::Default, note: "", own_default: |_| None }
    }

    /// A key that is followed when `when` says so.
    pub(super) const fn taken(
        name: &'static str,
        default: &'static str,
        when: When,
        by: &'static str,
        set: fn(&mut Draft, &Value) -> Result<(), String>,
    ) -> Self {
        Self::new(name, default, Rule::Taken { by, when, set })
    }

    pub(super) const fn ignored(name: &'static str, default: &'static str, why: &'static str) -> Self {
        Self::new(name, default, Rule::Ignored(why))
    }

    pub(super) const fn nearly(name: &'static str, default: &'static str, how: &'static str) -> Self {
        Self::new(name, default, Rule::Nearly(how))
    }

    /// A key whose `values` have no effect, and others are refused.
    pub(super) const fn off(
        name: &'static str,
        default: &'static str,
        values: &'static [&'static str],
        why: &'static str,
    ) -> Self {
        Self::new(name, default, Rule::Off { values, why })
    }

    /// A key that must not be true.
    pub(super) const fn not_true(name: &'static str, why: &'static str) -> Self {
        Self::off(name, "false", &["false"], why)
    }

    /// The keys of a part that does not exist; `name` ends in `.*`.
    pub(super) const fn switches(name: &'static str, why: &'static str) -> Self {
        Self::new(name, "null", Rule::Switches(why))
    }

    /// The field that `"auto"` stands for.
    pub(super) const fn given(self, field: &'static str, get: fn(&DeepSpeedGiven) -> Option<Value>) -> Self {
        self.given_or(OrElse::Refusal, field, get)
    }

    /// The field that `"auto"` stands for, and what it does if that is not given.
    pub(super) const fn given_or(
        mut self,
        or: OrElse,
        field: &'static str,
        get: fn(&DeepSpeedGiven) -> Option<Value>,
    ) -> Self {
        self.auto = Auto::Given { field, get, or };
        self
    }

    /// More for the documentation.
    pub(super) const fn note(mut self, note: &'static str) -> Self {
        self.note = note;
        self
    }

    /// A default that depends on other keys.
    pub(super) const fn or_own(mut self, own_default: fn(&Draft) -> Option<Value>) -> Self {
        self.own_default = own_default;
        self
    }

    /// DeepSpeed's default.
    pub(super) fn default(&self) -> Value {
        json(self.default)
    }

    /// DeepSpeed's default, with other keys as they are.
    pub(super) fn default_beside(&self, draft: &Draft) -> Value {
        (self.own_default)(draft).unwrap_or_else(|| self.default())
    }

    /// Whether it stands for all keys of a table and `path` is of one of them.
    fn has_within(&self, path: &str) -> bool {
        self.name.strip_suffix('*').is_some_and(|table| path.starts_with(table))
    }

    /// What a value must be, unless `value` is it.
    pub(super) fn wrong_type(&self, value: &Value) -> Option<&'static str> {
        match (self.default(), value) {
            (Value::Nothing, _)
            | (Value::Bool(_), Value::Bool(_))
            | (Value::Float(_), Value::Float(_) | Value::Integer(_))
            | (Value::Text(_), Value::Text(_))
            | (Value::Array(_), Value::Array(_))
            | (Value::Table(_), Value::Table(_)) => None,
            (Value::Integer(_), value) if integer(value).is_ok() => None,
            (Value::Bool(_), _) => Some("write true or false"),
            (Value::Float(_), _) => Some("write a number"),
            (Value::Text(_), _) => Some("write a string"),
            (Value::Array(_), _) => Some("write an array"),
            (Value::Table(_), _) => Some("write an object"),
            (Value::Integer(_), _) => Some(AN_INTEGER),
        }
    }
}

/// A value of the tables. A test reads every one of them.
pub(super) fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or(Value::Nothing)
}

/// The key of this path; a name of its own goes before a table's.
pub(super) fn find(path: &str) -> Option<&'static Key> {
    let mut keys = keys::all();
    keys.clone().find(|key| key.name == path).or_else(|| keys.find(|key| key.has_within(path)))
}

/// Whether a path is within a table whose keys are not told apart.
pub(super) fn is_open(path: &str) -> bool {
    keys::all().any(|key| key.has_within(path))
}

/// Whether keys of this table are known.
pub(super) fn is_table(path: &str) -> bool {
    keys::all().any(|key| {
        key.name.strip_prefix(path).is_some_and(|rest| rest.starts_with('.')) || key.has_within(path)
    })
}

/// The path that DeepSpeed knows an old or short one by today.
pub(super) fn renamed(path: &str) -> String {
    for (old, new) in keys::OLD_NAMES {
        if let Some(rest) = path.strip_prefix(old) {
            if rest.is_empty() || rest.starts_with('.') {
                return format!("{new}{rest}");
            }
        }
    }
    path.to_owned()
}

/// Why a path is refused that no key has.
pub(super) fn unknown(path: &str) -> String {
    let (table, name) = path.rsplit_once('.').unwrap_or(("", path));
    let prefix = if table.is_empty() { String::new() } else { format!("{}.", renamed(table)) };
    let siblings = keys::all().map(|key| key.name).chain(keys::OLD_NAMES.iter().map(|(old, _)| *old));
    let siblings =
        siblings.filter_map(|name| name.strip_prefix(&prefix)?.split('.').next()).filter(|name| *name != "*");
    let elsewhere = || {
        keys::all()
            .map(|key| key.name)
            .find(|known| known.rsplit('.').next().is_some_and(|last| last == name))
    };
    match nearest(name, siblings) {
        Some(near) => format!("unknown key; did you mean `{prefix}{near}`?"),
        None => match elsewhere() {
            Some(known) => format!("unknown key; did you mean `{known}`?"),
            None => "unknown key, and none is like it; remove it".into(),
        },
    }
}

const AN_INTEGER: &str = "write an integer";

/// An integer, or a float that stands for one, such as `5e8`.
pub(super) fn integer(value: &Value) -> Result<i128, String> {
    match value {
        Value::Integer(number) => Ok(*number),
        // Below 2^63 the cast is exact; `count` refuses what is above.
        Value::Float(number) if number.fract() == 0.0 => Ok(*number as i128),
        _ => Err(AN_INTEGER.into()),
    }
}

/// An integer from `least` to the largest that a configuration can hold.
pub(super) fn count(value: &Value, least: u64) -> Result<u64, String> {
    let number = integer(value)?;
    let refusal = || format!("must be at least {least} and at most {}", i64::MAX);
    u64::try_from(number).ok().filter(|number| (least..=i64::MAX as u64).contains(number)).ok_or_else(refusal)
}

pub(super) fn boolean(value: &Value) -> Result<bool, String> {
    match value {
        Value::Bool(value) => Ok(*value),
        _ => Err("write true or false".into()),
    }
}

/// A finite number within bounds, whose description is `allowed`.
pub(super) fn number(value: &Value, allowed: &str, within: impl Fn(f64) -> bool) -> Result<f64, String> {
    let number = match value {
        Value::Float(number) => *number,
        Value::Integer(number) => *number as f64,
        _ => return Err("write a number".into()),
    };
    if number.is_finite() && within(number) { Ok(number) } else { Err(format!("must be {allowed}")) }
}

/// A value, or `None` for `null`.
pub(super) fn optional<T>(
    value: &Value,
    read: impl FnOnce(&Value) -> Result<T, String>,
) -> Result<Option<T>, String> {
    if *value == Value::Nothing { Ok(None) } else { read(value).map(Some) }
}

/// One of a few words, whatever the case of letters.
pub(super) fn choice<T: Copy>(value: &Value, choices: &[(&str, T)]) -> Result<T, String> {
    let found = match value {
        Value::Text(word) => choices.iter().find(|(name, _)| name.eq_ignore_ascii_case(word)),
        _ => None,
    };
    found.map(|(_, choice)| *choice).ok_or_else(|| {
        let names: Vec<_> = choices.iter().map(|(name, _)| format!("{name:?}")).collect();
        format!("must be one of {}", names.join(", "))
    })
}
