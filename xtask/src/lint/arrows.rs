//! Which member may depend on which: arrows point down only.

use super::Problem;
use crate::workspace::{Package, Workspace};

/// A member and what it may depend on.
struct Arrows {
    from: &'static str,
    to: &'static [&'static str],
    /// Whether Burn and what belongs to it may be used.
    burn: bool,
}

const ARROWS: [Arrows; 6] = [
    Arrows { from: "zero-core", to: &[], burn: false },
    Arrows { from: "zero-comm", to: &["zero-core"], burn: false },
    Arrows { from: "zero-offload", to: &["zero-core"], burn: false },
    Arrows { from: "zero-checkpoint", to: &["zero-core"], burn: false },
    Arrows {
        from: "zero-burn",
        to: &["zero-core", "zero-comm", "zero-offload", "zero-checkpoint"],
        burn: true,
    },
    Arrows { from: "xtask", to: &[], burn: false },
];

pub(super) fn check(workspace: &Workspace) -> Vec<Problem> {
    workspace.packages.iter().flat_map(|package| check_package(workspace, package)).collect()
}

fn check_package(workspace: &Workspace, package: &Package) -> Vec<Problem> {
    let folder = workspace.folder(package);
    let problem = |what: String| Problem::new(format!("{folder}/Cargo.toml"), what);
    let Some(arrows) = ARROWS.iter().find(|arrows| arrows.from == package.name) else {
        // Examples stand on top: they may use everything.
        let is_example = folder.starts_with("examples/");
        return if is_example {
            Vec::new()
        } else {
            vec![problem("is a new member: say in the lint what it may depend on".to_owned())]
        };
    };
    let ours = |name: &str| workspace.packages.iter().any(|member| member.name == name);
    let mut problems = Vec::new();
    for dependency in &package.dependencies {
        let name = dependency.name.as_str();
        // The adapter is tested on the examples' models.
        let tests_on_example = arrows.burn && dependency.kind.as_deref() == Some("dev");
        if ours(name) && !arrows.to.contains(&name) && !tests_on_example {
            problems.push(problem(format!("{} must not depend on {name}: arrows point down", package.name)));
        }
        if is_burn(name) && !arrows.burn {
            problems.push(problem(format!("{} must not know Burn, but depends on {name}", package.name)));
        }
    }
    problems
}

fn is_burn(name: &str) -> bool {
    name == "burn" || name.starts_with("burn-") || name.starts_with("cubecl")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{Workspace, check};

    /// A folder, and the names and kinds of what is depended on.
    type Member<'a> = (&'a str, &'a [(&'a str, Option<&'a str>)]);

    fn workspace(members: &[Member<'_>]) -> Workspace {
        let package = |(folder, dependencies): &Member<'_>| -> Value {
            let dependencies: Vec<_> =
                dependencies.iter().map(|(name, kind)| json!({"name": name, "kind": kind})).collect();
            json!({
                "name": folder.rsplit('/').next(), "manifest_path": format!("/w/{folder}/Cargo.toml"),
                "dependencies": dependencies, "targets": [],
            })
        };
        let packages: Vec<_> = members.iter().map(package).collect();
        serde_json::from_value(json!({"packages": packages, "workspace_root": "/w"})).unwrap()
    }

    fn problems(members: &[Member<'_>]) -> Vec<String> {
        check(&workspace(members)).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn arrows_that_point_down_are_right() {
        let found = problems(&[
            ("zero-core", &[("serde", None)]),
            ("zero-comm", &[("zero-core", None), ("proptest", Some("dev"))]),
            ("zero-burn", &[("zero-comm", None), ("burn", None), ("gpt", Some("dev"))]),
            ("examples/gpt", &[("zero-burn", None), ("burn", None)]),
            ("xtask", &[("clap", None)]),
        ]);
        assert!(found.is_empty(), "{found:?}");
    }

    #[test]
    fn an_arrow_to_a_sibling_or_upward_is_named_also_in_tests() {
        let found = problems(&[
            ("zero-core", &[("zero-comm", Some("dev"))]),
            ("zero-comm", &[("zero-offload", None)]),
            ("zero-offload", &[]),
            ("zero-burn", &[("gpt", None)]),
            ("examples/gpt", &[]),
            ("xtask", &[("zero-core", None)]),
        ]);
        assert_eq!(
            found,
            [
                "zero-core/Cargo.toml: zero-core must not depend on zero-comm: arrows point down",
                "zero-comm/Cargo.toml: zero-comm must not depend on zero-offload: arrows point down",
                "zero-burn/Cargo.toml: zero-burn must not depend on gpt: arrows point down",
                "xtask/Cargo.toml: xtask must not depend on zero-core: arrows point down",
            ]
        );
    }

    #[test]
    fn a_leaf_does_not_know_burn() {
        for name in ["burn", "burn-flex", "cubecl", "cubecl-core"] {
            let found = problems(&[("zero-checkpoint", &[(name, Some("dev"))])]);
            let expected = format!(
                "zero-checkpoint/Cargo.toml: zero-checkpoint must not know Burn, but depends on {name}"
            );
            assert_eq!(found, [expected]);
        }
        assert!(problems(&[("zero-checkpoint", &[("burner", None)])]).is_empty());
    }

    #[test]
    fn a_new_member_needs_a_rule() {
        let found = problems(&[("zero-new", &[])]);
        assert_eq!(found, ["zero-new/Cargo.toml: is a new member: say in the lint what it may depend on"]);
    }
}
