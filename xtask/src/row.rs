//! What a benchmark measures.

use std::collections::BTreeSet;

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};

use crate::table::{Align, Table};

/// One number and the bar it is held to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Row {
    pub(crate) name: String,
    /// Nothing where it could not be measured.
    pub(crate) value: Option<f64>,
    pub(crate) unit: String,
    /// What the value has to reach, or stay under; the benchmark knows which.
    pub(crate) bar: Option<f64>,
    /// Nothing where there is no bar, or where it does not apply.
    pub(crate) pass: Option<bool>,
}

/// Reads and validates the rows that a benchmark wrote.
pub(crate) fn parse(json: &str) -> anyhow::Result<Vec<Row>> {
    let rows: Vec<Row> = serde_json::from_str(json).context("the rows have another form than expected")?;
    ensure!(!rows.is_empty(), "the benchmark measured nothing");
    let mut names = BTreeSet::new();
    for row in &rows {
        ensure!(!row.name.trim().is_empty(), "a row has no name");
        ensure!(names.insert(&row.name), "two rows are named '{}'", row.name);
        let passes = row.pass == Some(true);
        ensure!(!passes || row.value.is_some(), "row '{}' passes, but has no value", row.name);
        ensure!(!passes || row.bar.is_some(), "row '{}' passes, but has no bar", row.name);
    }
    Ok(rows)
}

pub(crate) fn table(rows: &[Row]) -> Table<5> {
    let mut table = Table::new([
        ("name", Align::Left),
        ("value", Align::Right),
        ("unit", Align::Left),
        ("bar", Align::Right),
        ("result", Align::Left),
    ]);
    for row in rows {
        let result = match row.pass {
            Some(true) => "pass",
            Some(false) => "FAIL",
            None => "-",
        };
        table.push([
            row.name.clone(),
            number(row.value),
            row.unit.clone(),
            number(row.bar),
            result.to_owned(),
        ]);
    }
    table
}

/// Four significant digits, or as many as the whole part has; nothing is a dash.
fn number(value: Option<f64>) -> String {
    match value {
        None => "-".to_owned(),
        Some(0.0) => "0".to_owned(),
        Some(value) if (1e-3..1e9).contains(&value.abs()) => {
            // The match above keeps this within -3 ..= 8.
            let magnitude = value.abs().log10().floor() as i32;
            format!("{value:.*}", (3 - magnitude).max(0) as usize)
        }
        Some(value) => format!("{value:.3e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::{Row, number, parse, table};

    fn error(json: &str) -> String {
        format!("{:#}", parse(json).unwrap_err())
    }

    #[test]
    fn rows_with_and_without_a_verdict_are_read() {
        let rows = parse(
            r#"[{"name":"gather","value":1.5,"unit":"x","bar":1.2,"pass":true},
                {"name":"peer","value":null,"unit":"ms","bar":null,"pass":null},
                {"name":"step","value":9,"unit":"ms","bar":8.5,"pass":false}]"#,
        )
        .unwrap();
        assert_eq!(rows.iter().map(|row| row.pass).collect::<Vec<_>>(), [Some(true), None, Some(false)]);
        assert_eq!(rows[1].value, None);
    }

    #[test]
    fn a_pass_without_a_value_or_a_bar_is_no_pass() {
        assert_eq!(
            error(r#"[{"name":"a","value":null,"unit":"x","bar":1,"pass":true}]"#),
            "row 'a' passes, but has no value"
        );
        assert_eq!(
            error(r#"[{"name":"a","value":1,"unit":"x","bar":null,"pass":true}]"#),
            "row 'a' passes, but has no bar"
        );
    }

    #[test]
    fn rows_that_cannot_be_told_apart_are_refused() {
        let row = r#"{"name":"a","value":1,"unit":"x","bar":null,"pass":null}"#;
        assert_eq!(error(&format!("[{row},{row}]")), "two rows are named 'a'");
        assert_eq!(
            error(r#"[{"name":" ","value":1,"unit":"x","bar":null,"pass":null}]"#),
            "a row has no name"
        );
    }

    #[test]
    fn nothing_measured_is_an_error() {
        assert_eq!(error("[]"), "the benchmark measured nothing");
    }

    #[test]
    fn another_form_is_an_error_that_says_where() {
        for json in [
            "",
            "{}",
            r#"[{"name":"a"}]"#,
            r#"[{"name":"a","value":"1","unit":"x","bar":null,"pass":null}]"#,
            r#"[{"name":"a","value":1,"unit":"x","bar":null,"pass":null,"passed":true}]"#,
        ] {
            assert!(error(json).contains("at line"), "{}", error(json));
        }
    }

    #[test]
    fn the_table_marks_what_failed() {
        let row =
            |name: &str, value, bar, pass| Row { name: name.into(), value, unit: "x".into(), bar, pass };
        let rows = [
            row("gather", Some(1.25), Some(1.0), Some(true)),
            row("peer", None, None, None),
            row("step", Some(12.0), Some(100.0), Some(false)),
        ];
        let expected = "\
name    value  unit    bar  result
------  -----  ----  -----  ------
gather  1.250  x     1.000  pass
peer        -  x         -  -
step    12.00  x     100.0  FAIL
";
        assert_eq!(table(&rows).to_string(), expected);
    }

    #[test]
    fn numbers_keep_four_digits() {
        let shown = [0.0, 0.001234567, -1.5, 999.96, 123_456.0, 1e12, 1e-9].map(|value| number(Some(value)));
        assert_eq!(shown, ["0", "0.001235", "-1.500", "1000.0", "123456", "1.000e12", "1.000e-9"]);
    }
}
