//! Versions stand once, in the workspace's manifest.

use toml::{Table, Value};

use super::Problem;

const SECTIONS: [&str; 3] = ["dependencies", "dev-dependencies", "build-dependencies"];

/// Checks a member's manifest: every dependency says `workspace = true`.
pub(super) fn check(path: &str, text: &str) -> Vec<Problem> {
    let manifest: Table = match text.parse() {
        Ok(manifest) => manifest,
        Err(error) => return vec![Problem::new(path, format!("is not valid TOML: {error}"))],
    };
    let table = |value: &Value| value.as_table().cloned();
    let for_targets = manifest.get("target").and_then(table).unwrap_or_default();
    std::iter::once(&manifest)
        .chain(for_targets.values().filter_map(Value::as_table))
        .flat_map(|scope| SECTIONS.iter().filter_map(|section| scope.get(*section)?.as_table()))
        .flatten()
        .filter(|(_, dependency)| dependency.get("workspace").and_then(Value::as_bool) != Some(true))
        .map(|(name, _)| {
            Problem::new(path, format!("{name} must be `{name}.workspace = true`, its version in the root"))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::check;

    fn broken(text: &str) -> Vec<String> {
        let names = check("a/Cargo.toml", text).into_iter();
        names.map(|problem| problem.what.split(' ').next().unwrap_or_default().to_owned()).collect()
    }

    #[test]
    fn dependencies_of_the_workspace_are_right() {
        let text = r#"
            [package]
            name = "a"
            version.workspace = true
            [dependencies]
            serde.workspace = true
            burn = { workspace = true, optional = true }
            [lints]
            workspace = true
        "#;
        assert!(broken(text).is_empty(), "{:?}", broken(text));
    }

    #[test]
    fn a_version_or_a_path_in_a_member_is_a_problem_in_every_section() {
        let text = r#"
            [dependencies]
            serde = "1"
            ours = { path = "../ours" }
            odd = { workspace = false }
            [dev-dependencies]
            rand = { version = "0.9", features = ["std"] }
            [target.'cfg(unix)'.build-dependencies]
            cc = "1"
        "#;
        assert_eq!(broken(text), ["odd", "ours", "serde", "rand", "cc"]);
    }

    #[test]
    fn what_is_not_toml_is_a_problem_and_no_panic() {
        assert_eq!(broken("[dependencies"), ["is"]);
        assert!(broken("dependencies = 3").is_empty());
    }
}
