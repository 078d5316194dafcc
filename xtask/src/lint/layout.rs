//! What stands at the top of the repository.

use std::collections::BTreeSet;

use super::Problem;

/// What has to be there.
const REQUIRED: [&str; 15] = [
    "CHANGELOG.md",
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE-APACHE",
    "LICENSE-MIT",
    "README.md",
    "deny.toml",
    "examples",
    "rustfmt.toml",
    "xtask",
    "zero-burn",
    "zero-checkpoint",
    "zero-comm",
    "zero-core",
    "zero-offload",
];

/// What may be there, besides names that begin with a dot.
const OPTIONAL: [&str; 1] = ["docs"];

/// `files` are paths from the top, with `/` between their parts.
pub(super) fn check(files: &[&str]) -> Vec<Problem> {
    let found: BTreeSet<&str> = files.iter().filter_map(|file| file.split('/').next()).collect();
    let extra = found
        .iter()
        .filter(|name| !name.starts_with('.') && !REQUIRED.contains(name) && !OPTIONAL.contains(name))
        .map(|&name| Problem::new(name, "does not belong at the top of the repository"));
    let missing = REQUIRED
        .iter()
        .filter(|name| !found.contains(*name))
        .map(|&name| Problem::new(name, "is missing at the top of the repository"));
    extra.chain(missing).collect()
}

#[cfg(test)]
mod tests {
    use super::{Problem, REQUIRED, check};

    #[test]
    fn the_required_layout_with_docs_and_dotfiles_is_right() {
        let mut files = REQUIRED.to_vec();
        files.extend(["docs/book.md", ".ci/run", ".gitignore", "zero-core/src/lib.rs"]);
        assert_eq!(check(&files), []);
    }

    #[test]
    fn what_is_too_much_or_too_little_is_named() {
        let mut files = REQUIRED.to_vec();
        files.retain(|&file| file != "README.md");
        files.push("scripts/run.sh");
        assert_eq!(
            check(&files),
            [
                Problem::new("scripts", "does not belong at the top of the repository"),
                Problem::new("README.md", "is missing at the top of the repository"),
            ]
        );
    }
}
