//! Tables for a terminal.

use std::fmt;

/// Which side of its column a cell stands on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Align {
    Left,
    Right,
}

/// Rows of cells in columns as wide as their widest cell, under a header and a rule.
pub(crate) struct Table<const COLUMNS: usize> {
    aligns: [Align; COLUMNS],
    rows: Vec<[String; COLUMNS]>,
}

impl<const COLUMNS: usize> Table<COLUMNS> {
    pub(crate) fn new(columns: [(&str, Align); COLUMNS]) -> Self {
        Self { aligns: columns.map(|(_, align)| align), rows: vec![columns.map(|(name, _)| name.to_owned())] }
    }

    /// Adds a row; a line break in a cell becomes a space.
    pub(crate) fn push(&mut self, cells: [String; COLUMNS]) {
        self.rows.push(cells.map(|cell| cell.split_whitespace().collect::<Vec<_>>().join(" ")));
    }

    fn widths(&self) -> [usize; COLUMNS] {
        std::array::from_fn(|column| {
            self.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0)
        })
    }
}

impl<const COLUMNS: usize> fmt::Display for Table<COLUMNS> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let widths = self.widths();
        let rule = widths.map(|width| "-".repeat(width)).join("  ");
        for (index, row) in self.rows.iter().enumerate() {
            let cells: [String; COLUMNS] = std::array::from_fn(|column| {
                let (cell, width) = (&row[column], widths[column]);
                match self.aligns[column] {
                    Align::Left => format!("{cell:<width$}"),
                    Align::Right => format!("{cell:>width$}"),
                }
            });
            writeln!(f, "{}", cells.join("  ").trim_end())?;
            if index == 0 {
                writeln!(f, "{rule}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{Align, Table};

    #[test]
    fn columns_are_as_wide_as_their_widest_cell_and_lines_end_without_blanks() {
        let mut table = Table::new([("suite", Align::Left), ("seconds", Align::Right), ("why", Align::Left)]);
        table.push(["clippy".into(), "12.3".into(), String::new()]);
        table.push(["fmt".into(), "0.4".into(), "größer".into()]);
        let expected = "\
suite   seconds  why
------  -------  ------
clippy     12.3
fmt         0.4  größer
";
        assert_eq!(table.to_string(), expected);
    }

    #[test]
    fn a_cell_stays_on_its_line() {
        let mut table = Table::new([("why", Align::Left)]);
        table.push(["two\nlines".into()]);
        assert_eq!(table.to_string(), "why\n---------\ntwo lines\n");
    }

    #[test]
    fn a_table_without_rows_is_its_header() {
        assert_eq!(Table::new([("a", Align::Left), ("b", Align::Right)]).to_string(), "a  b\n-  -\n");
    }
}
