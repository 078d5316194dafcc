//! The documentation says what the code does.

use std::fs;

use zero_core::{DeepSpeedImport, ZeroConfig};

/// Compares what stands between two markers of a document with what the code makes. With `UPDATE_EXPECT=1` in
/// the environment the document is rewritten instead.
fn check(document: &str, name: &str, expected: &str) {
    let path = format!("{}/../docs/{document}", env!("CARGO_MANIFEST_DIR"));
    let (begin, end) = (format!("<!-- {name}:begin -->\n"), format!("<!-- {name}:end -->"));
    let text = fs::read_to_string(&path).unwrap();
    let (before, rest) = text.split_once(&begin).expect("the document has the marker that begins the table");
    let (table, after) = rest.split_once(&end).expect("the document has the marker that ends the table");
    if std::env::var_os("UPDATE_EXPECT").is_some_and(|value| value == "1") {
        fs::write(path, format!("{before}{begin}{expected}{end}{after}")).unwrap();
        return;
    }
    assert_eq!(
        table, expected,
        "docs/{document} is out of date; UPDATE_EXPECT=1 cargo test -p zero-core rewrites it"
    );
}

#[test]
fn the_table_of_defaults_is_the_one_the_code_makes() {
    check("configuration.md", "defaults", &ZeroConfig::defaults_table());
}

#[test]
fn the_table_of_deepspeed_keys_is_the_one_the_code_makes() {
    check("deepspeed.md", "keys", &DeepSpeedImport::keys_table());
}

#[test]
fn every_example_of_a_configuration_is_one() {
    let path = format!("{}/../docs/configuration.md", env!("CARGO_MANIFEST_DIR"));
    let text = fs::read_to_string(path).unwrap();
    let examples: Vec<_> =
        text.split("```toml\n").skip(1).filter_map(|rest| rest.split_once("```")).collect();
    assert_eq!(examples.len(), 2);
    for (example, _) in examples {
        ZeroConfig::from_toml(example).unwrap();
    }
}
