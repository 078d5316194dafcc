//! Lists of hosts as Slurm writes them.

use std::ops::RangeInclusive;

/// The largest number of hosts in a list.
pub(super) const MAX_NODES: usize = 1 << 16;

/// The longest name of a host, in bytes.
const MAX_NAME: usize = 255;

/// A list of hosts that is not one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{list:?} is not a list of hosts such as `node[01-03,07],gpu5`: {reason}")]
pub struct NodeListError {
    /// The list.
    pub list: String,
    /// What is wrong with it.
    pub reason: String,
}

/// Expands `node[01-03,07],gpu5` to `node01`, `node02`, `node03`, `node07`, `gpu5`.
///
/// A name may have several brackets, and text after them. Numbers keep the width of the first of their range.
/// The result has at least one name.
///
/// # Errors
///
/// [`NodeListError`] if the list is malformed, has more than 65536 hosts, or names longer than 255 bytes.
///
/// ```
/// let nodes = zero_comm::expand_node_list("rack[1-2]n[09-10]")?;
/// assert_eq!(nodes, ["rack1n09", "rack1n10", "rack2n09", "rack2n10"]);
/// # Ok::<_, zero_comm::NodeListError>(())
/// ```
pub fn expand_node_list(list: &str) -> Result<Vec<String>, NodeListError> {
    expand(list).map_err(|reason| NodeListError { list: list.to_owned(), reason })
}

fn expand(list: &str) -> Result<Vec<String>, String> {
    let mut nodes = Vec::new();
    let mut bracket = false;
    // Commas within brackets do not part names.
    let parts = list.split(|c: char| {
        bracket = (bracket || c == '[') && c != ']';
        c == ',' && !bracket
    });
    for part in parts {
        nodes.extend(expand_name(part)?);
        if nodes.len() > MAX_NODES {
            return Err(too_many());
        }
    }
    Ok(nodes)
}

fn expand_name(name: &str) -> Result<Vec<String>, String> {
    let mut names = vec![String::new()];
    let mut rest = name;
    while let Some((before, after)) = rest.split_once('[') {
        let (inside, behind) =
            after.split_once(']').ok_or_else(|| format!("a bracket in {name:?} is not closed"))?;
        append(&mut names, text(before)?);
        let numbers = numbers(inside)?;
        if names.len() * numbers.len() > MAX_NODES {
            return Err(too_many());
        }
        if names[0].len() > MAX_NAME {
            return Err(too_long());
        }
        names = names
            .iter()
            .flat_map(|name| numbers.iter().map(move |number| format!("{name}{number}")))
            .collect();
        rest = behind;
    }
    append(&mut names, text(rest)?);
    match names.iter().map(String::len).max() {
        Some(1..=MAX_NAME) => Ok(names),
        Some(0) => Err("a name is empty".to_owned()),
        _ => Err(too_long()),
    }
}

fn append(names: &mut [String], text: &str) {
    for name in names {
        name.push_str(text);
    }
}

/// `text` itself, if it may stand in the name of a host.
fn text(text: &str) -> Result<&str, String> {
    match text.chars().find(|c| !(c.is_alphanumeric() || "-_.".contains(*c))) {
        None if text.len() <= MAX_NAME => Ok(text),
        None => Err(too_long()),
        Some(c) => Err(format!("{c:?} does not belong there")),
    }
}

/// The numbers of `01-03,07`, each as wide as the first of its range.
fn numbers(list: &str) -> Result<Vec<String>, String> {
    let mut numbers = Vec::new();
    for item in list.split(',') {
        let (first, last) = item.split_once('-').unwrap_or((item, item));
        let range: RangeInclusive<u64> = number(first)?..=number(last)?;
        if range.is_empty() {
            return Err(format!("the range {item} ends before it begins"));
        }
        let width = first.len();
        // A range can be longer than memory.
        numbers.extend(range.take(MAX_NODES + 1).map(|number| format!("{number:0width$}")));
        if numbers.len() > MAX_NODES {
            return Err(too_many());
        }
    }
    Ok(numbers)
}

fn number(text: &str) -> Result<u64, String> {
    // `parse` would take a sign.
    match text.parse() {
        Ok(number) if text.len() <= MAX_DIGITS && text.bytes().all(|byte| byte.is_ascii_digit()) => {
            Ok(number)
        }
        _ => Err(format!("{text:?} is not a number")),
    }
}

/// The longest number, in digits.
const MAX_DIGITS: usize = 18;

fn too_many() -> String {
    format!("it has more than {MAX_NODES} hosts")
}

fn too_long() -> String {
    format!("a name is longer than {MAX_NAME} bytes")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{MAX_NODES, expand_node_list};

    fn expanded(list: &str) -> Vec<String> {
        expand_node_list(list).unwrap()
    }

    #[test]
    fn ranges_and_names_are_expanded_in_order() {
        for (list, nodes) in [
            ("gpu5", vec!["gpu5"]),
            ("b,a,a", vec!["b", "a", "a"]),
            ("node[01-03,07],gpu5", vec!["node01", "node02", "node03", "node07", "gpu5"]),
            ("n[8-11]", vec!["n8", "n9", "n10", "n11"]),
            ("n[08-11]", vec!["n08", "n09", "n10", "n11"]),
            ("n[098-101]", vec!["n098", "n099", "n100", "n101"]),
            ("n[1,003,2]", vec!["n1", "n003", "n2"]),
            ("n[5-5]", vec!["n5"]),
            ("r[1-2]n[3,4]", vec!["r1n3", "r1n4", "r2n3", "r2n4"]),
            ("n[1-2]-ib.cluster,x[0]y", vec!["n1-ib.cluster", "n2-ib.cluster", "x0y"]),
            ("[1-2]", vec!["1", "2"]),
            ("10.0.0.1", vec!["10.0.0.1"]),
        ] {
            assert_eq!(expanded(list), nodes, "{list}");
        }
    }

    #[test]
    fn a_long_list_is_expanded_and_one_that_is_too_long_refused() {
        assert_eq!(expanded("n[1-65536]").len(), MAX_NODES);
        assert_eq!(expanded("a[1-256]b[1-256]").len(), MAX_NODES);
        for list in [
            "n[0-65536]",
            "n[1-65536],m",
            "a[1-256]b[1-257]",
            "n[0-999999999999999999]",
            "n[1-60000,1-60000]",
            "a[1-60000]b[1-60000]c[1-60000]",
        ] {
            assert!(expand_node_list(list).unwrap_err().reason.contains("more than"), "{list}");
        }
    }

    #[test]
    fn a_malformed_list_is_refused_with_the_reason() {
        for (list, reason) in [
            ("", "empty"),
            ("a,", "empty"),
            (",a", "empty"),
            ("a,,b", "empty"),
            ("a[1", "not closed"),
            ("a[1,b", "not closed"),
            ("a1]", "']'"),
            ("a]1[", "not closed"),
            ("a[1]]", "']'"),
            ("a[[1]]", "not a number"),
            ("a[]", "not a number"),
            ("a[1,]", "not a number"),
            ("a[1-]", "not a number"),
            ("a[-1]", "not a number"),
            ("a[1-2-3]", "not a number"),
            ("a[+1]", "not a number"),
            ("a[x]", "not a number"),
            ("a[99999999999999999999]", "not a number"),
            ("a[3-1]", "ends before"),
            ("a b", "' '"),
            ("a/b", "'/'"),
            ("a\nb", "'\\n'"),
        ] {
            let error = expand_node_list(list).unwrap_err();
            assert!(error.reason.contains(reason), "{list}: {error}");
        }
        assert!(expand_node_list(&"a".repeat(256)).unwrap_err().reason.contains("longer"));
        assert!(expand_node_list(&format!("{}[10]", "a".repeat(254))).unwrap_err().reason.contains("longer"));
        assert_eq!(expanded(&"a".repeat(255)).len(), 1);
        let growing = format!("a[1-65536]{}", format!("{}[1]", "b".repeat(255)).repeat(1000));
        assert!(expand_node_list(&growing).unwrap_err().reason.contains("longer"));
    }

    proptest! {
        #[test]
        fn any_text_is_expanded_or_refused(list in "[a-c0-9\\[\\],\\-]{0,24}") {
            if let Ok(nodes) = expand_node_list(&list) {
                prop_assert!(!nodes.is_empty());
                prop_assert!(nodes.iter().all(|node| !node.is_empty() && !node.contains(['[', ']', ','])));
            }
        }

        #[test]
        fn a_range_has_every_number_once(first in 0_u64..3000, count in 0_u64..200, width in 1_usize..6) {
            let nodes = expanded(&format!("n[{first:0width$}-{:0width$}]", first + count));
            let numbers: Vec<u64> = nodes.iter().map(|node| node[1..].parse().unwrap()).collect();
            prop_assert_eq!(numbers, (first..=first + count).collect::<Vec<_>>());
        }
    }
}
