//! What others call a parameter.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

use crate::manifest::WeightLayout;

/// A table from the names in published files to the names in a model, first match first.
///
/// Names are paths of components joined by dots. `*` stands for any one component; the one on the other side, in order, for
/// the same. Names that no entry matches stay what they are.
///
/// ```
/// use zero_checkpoint::NameMap;
///
/// let names: NameMap = r#"{
///     "transformer.wte.weight": "embedding.weight",
///     "transformer.h.*.mlp.c_fc.weight": {"name": "blocks.*.fc1.weight", "layout": "in_out"},
///     "transformer.h.*.ln_1.weight": "blocks.*.norm1.gamma"
/// }"#
/// .parse()?;
/// assert_eq!(names.to_model("transformer.h.7.ln_1.weight").0, "blocks.7.norm1.gamma");
/// assert_eq!(names.to_published("blocks.11.norm1.gamma").0, "transformer.h.11.ln_1.weight");
/// assert_eq!(names.to_model("step").0, "step");
/// # Ok::<(), zero_checkpoint::NameMapError>(())
/// ```
///
/// `layout` says how a published file lays a tensor out, where that is not PyTorch's way: `in_out` is a matrix of `[in,
/// out]`, as the `Conv1D` of GPT-2 has it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NameMap {
    entries: Vec<Entry>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    published: String,
    model: String,
    layout: WeightLayout,
}

/// A table of names cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("not a table of names: {0}; write {{\"published.name\": \"model.name\", ...}}")]
pub struct NameMapError(#[from] serde_json::Error);

impl std::str::FromStr for NameMap {
    type Err = NameMapError;

    fn from_str(text: &str) -> Result<Self, NameMapError> {
        Ok(serde_json::from_str(text)?)
    }
}

impl NameMap {
    /// What a model calls a published tensor, and how the file lays it out.
    pub fn to_model(&self, published: &str) -> (String, WeightLayout) {
        self.translate(published, |entry| (&entry.published, &entry.model))
    }

    /// What a published file calls a parameter, and how it lays it out.
    pub fn to_published(&self, model: &str) -> (String, WeightLayout) {
        self.translate(model, |entry| (&entry.model, &entry.published))
    }

    fn translate<'e>(
        &'e self,
        name: &str,
        sides: impl Fn(&'e Entry) -> (&'e String, &'e String),
    ) -> (String, WeightLayout) {
        let found = self.entries.iter().find_map(|entry| {
            let (from, to) = sides(entry);
            Some((replaced(name, from, to)?, entry.layout))
        });
        found.unwrap_or_else(|| (name.to_owned(), WeightLayout::Plain))
    }
}

/// `name` by the pattern `to`, if it matches the pattern `from`.
fn replaced(name: &str, from: &str, to: &str) -> Option<String> {
    if name.split('.').count() != from.split('.').count() {
        return None;
    }
    let mut stars = Vec::new();
    for (part, pattern) in name.split('.').zip(from.split('.')) {
        match pattern {
            "*" => stars.push(part),
            _ if part == pattern => {}
            _ => return None,
        }
    }
    let mut stars = stars.into_iter();
    let parts = to.split('.').map(|part| if part == "*" { stars.next().unwrap_or("*") } else { part });
    Some(parts.collect::<Vec<_>>().join("."))
}

impl<'de> Deserialize<'de> for NameMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Entries)
    }
}

/// In the order of the file, which a map of serde_json would lose.
struct Entries;

#[derive(Deserialize)]
#[serde(untagged)]
enum Right {
    Name(String),
    Table(Table),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    name: String,
    #[serde(default)]
    layout: WeightLayout,
}

impl<'de> Visitor<'de> for Entries {
    type Value = NameMap;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of names")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<NameMap, A::Error> {
        let mut entries: Vec<Entry> = Vec::new();
        while let Some((published, right)) = map.next_entry::<String, Right>()? {
            let (model, layout) = match right {
                Right::Name(name) => (name, WeightLayout::Plain),
                Right::Table(Table { name, layout }) => (name, layout),
            };
            let stars = |name: &str| name.split('.').filter(|part| *part == "*").count();
            if stars(&published) != stars(&model) {
                return Err(A::Error::custom(format!(
                    "`{published}` and `{model}` have different numbers of `*`"
                )));
            }
            if entries.iter().any(|entry| entry.published == published || entry.model == model) {
                return Err(A::Error::custom(format!("`{published}` or `{model}` is there twice")));
            }
            entries.push(Entry { published, model, layout });
        }
        Ok(NameMap { entries })
    }
}

#[cfg(test)]
mod tests {
    use super::NameMap;

    #[test]
    fn the_first_match_counts() {
        let names: NameMap = r#"{"a.0.x": "first.x", "a.*.x": "b.*.y"}"#.parse().unwrap();
        assert_eq!(names.to_model("a.0.x").0, "first.x");
        assert_eq!(names.to_model("a.1.x").0, "b.1.y");
        assert_eq!(names.to_model("a.1.x.more").0, "a.1.x.more");
        assert_eq!(names.to_published("b.12.y").0, "a.12.x");
    }

    #[test]
    fn tables_that_cannot_be_followed_are_refused() {
        for text in [
            "[]",
            r#"{"a": 1}"#,
            r#"{"a.*": "b"}"#,
            r#"{"a": "c", "b": "c"}"#,
            r#"{"a": {"name": "b", "layout": "odd"}}"#,
            r#"{"a": {"name": "b", "transposed": true}}"#,
        ] {
            assert!(text.parse::<NameMap>().is_err(), "{text}");
        }
    }
}
