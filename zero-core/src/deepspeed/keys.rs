//! Every key of a `ds_config.json`: the tables that reading and documentation share.

mod offload;
mod parts;
mod precision;
mod training;
mod update;
mod zero;

use super::key::Key;

/// Every key, in the order of the documentation.
pub(super) fn all() -> impl Iterator<Item = &'static Key> + Clone {
    [training::KEYS, precision::KEYS, update::KEYS, zero::KEYS, offload::KEYS, parts::KEYS]
        .into_iter()
        .flatten()
}

/// Old and short names of keys and tables, with those of today.
pub(super) static OLD_NAMES: &[(&str, &str)] = &[
    ("bfloat16", "bf16"),
    ("allgather_size", "zero_optimization.allgather_bucket_size"),
    ("aio.thread_count", "aio.intra_op_parallelism"),
    ("zero_optimization.prefetch_bucket_size", "zero_optimization.stage3_prefetch_bucket_size"),
    ("zero_optimization.param_persistence_threshold", "zero_optimization.stage3_param_persistence_threshold"),
    ("zero_optimization.model_persistence_threshold", "zero_optimization.stage3_model_persistence_threshold"),
    ("zero_optimization.max_live_parameters", "zero_optimization.stage3_max_live_parameters"),
    ("zero_optimization.max_reuse_distance", "zero_optimization.stage3_max_reuse_distance"),
    (
        "zero_optimization.gather_16bit_weights_on_model_save",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    ),
    (
        "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    ),
    (
        "zero_optimization.module_granularity_threshold",
        "zero_optimization.stage3_module_granularity_threshold",
    ),
    (
        "zero_optimization.use_all_reduce_for_fetch_params",
        "zero_optimization.stage3_use_all_reduce_for_fetch_params",
    ),
    ("zero_optimization.allgather_sequential", "zero_optimization.stage3_allgather_sequential"),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{OLD_NAMES, all};
    use crate::config::value::Value;
    use crate::deepspeed::draft::Draft;
    use crate::deepspeed::key::{self, Auto, Rule};

    #[test]
    fn each_name_is_there_once_and_found() {
        let names: BTreeSet<_> = all().map(|key| key.name).collect();
        assert_eq!(names.len(), all().count());
        for key in all() {
            let path = key.name.replace('*', "x");
            assert_eq!(key::find(&path).map(|found| found.name), Some(key.name));
            assert!(!key.name.contains('.') || key::is_table(key.name.rsplit_once('.').unwrap().0));
        }
        for (old, new) in OLD_NAMES {
            assert_eq!(key::renamed(old), *new);
            assert!(key::find(old).is_none() && (key::find(new).is_some() || key::is_table(new)), "{old}");
        }
    }

    #[test]
    fn each_text_is_json_and_fits_a_table_of_the_documentation() {
        let parsed = |text: &str| (text == "null") == (key::json(text) == Value::Nothing);
        for key in all() {
            assert!(parsed(key.default), "{}", key.name);
            let text = match key.rule {
                Rule::Taken { by, .. } => {
                    // Names of what holds the value, for the report says it of any value.
                    let named =
                        by.split(" and ").all(|name| name.len() > 2 && name.matches('`').count() == 2);
                    assert!(named && by.starts_with('`') && by.ends_with('`'), "{by}");
                    by
                }
                Rule::Ignored(why) | Rule::Nearly(why) | Rule::Switches(why) => why,
                Rule::Off { values, why } => {
                    assert!(values.iter().all(|value| parsed(value)) && values.contains(&key.default));
                    why
                }
            };
            assert!(!text.is_empty() && !text.contains(['|', '\n']), "{}", key.name);
            assert!(!key.note.contains(['|', '\n']), "{}", key.name);
            assert!(key.note.is_empty() || matches!(key.rule, Rule::Taken { .. }), "{}", key.name);
        }
    }

    #[test]
    fn each_default_is_that_of_the_draft() {
        for key in all() {
            let Rule::Taken { set, when, .. } = key.rule else {
                assert!(matches!(key.auto, Auto::Default), "{} takes no value", key.name);
                continue;
            };
            let mut draft = Draft::default();
            set(&mut draft, &key.default()).unwrap();
            assert_eq!(draft, Draft::default(), "{} {when:?}", key.name);
        }
    }
}
