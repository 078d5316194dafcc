//! The documentation says what the code does.

use std::fs;

use zero_core::ZeroConfig;

const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/configuration.md");
const BEGIN: &str = "<!-- defaults:begin -->\n";
const END: &str = "<!-- defaults:end -->";

/// With `UPDATE_EXPECT=1` in the environment the table in the document is rewritten instead.
#[test]
fn the_table_of_defaults_is_the_one_the_code_makes() {
    let text = fs::read_to_string(PATH).unwrap();
    let (before, rest) = text.split_once(BEGIN).expect("the document has the marker that begins the table");
    let (table, after) = rest.split_once(END).expect("the document has the marker that ends the table");
    let expected = ZeroConfig::defaults_table();
    if std::env::var_os("UPDATE_EXPECT").is_some_and(|value| value == "1") {
        fs::write(PATH, format!("{before}{BEGIN}{expected}{END}{after}")).unwrap();
        return;
    }
    assert_eq!(
        table, expected,
        "docs/configuration.md is out of date; UPDATE_EXPECT=1 cargo test -p zero-core rewrites it"
    );
}
