//! Source files: documented, of readable length.

use super::Problem;

/// Lines of a file, without its tests; beyond it there are two nouns in the file.
const MAX_LINES: usize = 500;

/// Checks one file; `path` is from the top of the repository, with `/` between its parts.
pub(super) fn check(path: &str, text: &str, in_library: bool) -> Vec<Problem> {
    let mut problems = Vec::new();
    if in_library && !text.starts_with("//!") {
        problems.push(Problem::new(path, "must begin with a `//!` line that says what the file is"));
    }
    let lines = code_lines(text);
    if !is_test(path) && lines > MAX_LINES {
        let what = format!("has {lines} lines without its tests, {MAX_LINES} are allowed: split it");
        problems.push(Problem::new(path, what));
    }
    problems
}

/// Whether the whole file is tests.
fn is_test(path: &str) -> bool {
    path.split('/').any(|part| part == "tests" || part == "tests.rs")
}

/// Lines up to the module of unit tests, which by custom ends a file.
fn code_lines(text: &str) -> usize {
    let lines: Vec<&str> = text.lines().collect();
    lines
        .windows(2)
        .position(|pair| pair[0] == "#[cfg(test)]" && pair[1].starts_with("mod ") && pair[1].ends_with('{'))
        .unwrap_or(lines.len())
}

#[cfg(test)]
mod tests {
    use super::{MAX_LINES, Problem, check};

    fn lines(count: usize) -> String {
        format!("//! Long.\n{}", "x\n".repeat(count - 1))
    }

    #[test]
    fn a_short_documented_file_is_right() {
        assert_eq!(check("zero-core/src/lib.rs", "//! What it is.\n", true), []);
    }

    #[test]
    fn a_library_file_begins_with_its_documentation() {
        for text in ["", "use std::fmt;\n//! Late.\n", "// No doc.\n"] {
            let problems = check("zero-core/src/a.rs", text, true);
            assert_eq!(problems.len(), 1, "{text}");
            assert!(problems[0].what.starts_with("must begin with"), "{}", problems[0]);
            assert_eq!(check("xtask/src/a.rs", text, false), []);
        }
    }

    #[test]
    fn a_file_of_too_many_lines_is_a_problem() {
        assert_eq!(check("a/src/a.rs", &lines(MAX_LINES), true), []);
        let what = "has 501 lines without its tests, 500 are allowed: split it";
        assert_eq!(check("a/src/a.rs", &lines(MAX_LINES + 1), true), [Problem::new("a/src/a.rs", what)]);
    }

    #[test]
    fn tests_do_not_count_as_lines() {
        let text = lines(MAX_LINES) + "#[cfg(test)]\nmod tests {\n" + &"x\n".repeat(100) + "}\n";
        assert_eq!(check("a/src/a.rs", &text, true), []);
        for path in ["a/tests/a.rs", "a/src/part/tests.rs", "a/src/tests/b.rs"] {
            assert_eq!(check(path, &lines(MAX_LINES + 1), true), []);
        }
    }
}
