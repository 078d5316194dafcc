//! Several arrays of one length.

use crate::store::{NvmeStore, Slot, StoreError};

/// Arrays side by side, in one store or in several: row `i` of every column belongs together, as the moments and the master weight of
/// one element do. What a [`Pipeline`](crate::Pipeline) updates.
#[derive(Debug)]
pub struct Table {
    name: String,
    rows: u64,
    columns: Vec<Column>,
}

#[derive(Debug)]
pub(crate) struct Column {
    pub(crate) slot: Slot,
    /// Bytes in a row.
    pub(crate) width: usize,
}

impl Table {
    /// Reserves a table of `rows` rows with columns of a name and a number of bytes a row each; all zeros at first.
    ///
    /// # Errors
    ///
    /// If a column has no width or is too large, or if the disk is too full.
    pub fn reserve(
        store: &NvmeStore,
        name: &str,
        rows: u64,
        columns: &[(&str, usize)],
    ) -> Result<Self, StoreError> {
        let columns = columns.iter().map(|&(column, width)| {
            let bytes = rows.checked_mul(width as u64).filter(|_| width > 0);
            let bytes = bytes.ok_or_else(|| StoreError::Column {
                table: name.to_owned(),
                rows,
                column: column.to_owned(),
                width,
            })?;
            Ok(Column { slot: store.reserve(&format!("{name}/{column}"), bytes)?, width })
        });
        Ok(Self { name: name.to_owned(), rows, columns: columns.collect::<Result<_, StoreError>>()? })
    }

    /// Takes the columns of `other` in, behind its own, to be updated together. They may be in another store.
    ///
    /// # Panics
    ///
    /// If `other` has more rows or fewer.
    pub fn append(&mut self, other: Self) {
        assert_eq!(self.rows, other.rows, "rows of `{}` and `{}` belong together", self.name, other.name);
        self.columns.extend(other.columns);
    }

    /// Moves the columns from `column` on out, as a table of the same name.
    ///
    /// # Panics
    ///
    /// If there are fewer columns.
    pub fn split_off(&mut self, column: usize) -> Self {
        Self { name: self.name.clone(), rows: self.rows, columns: self.columns.split_off(column) }
    }

    /// Bytes of all its columns.
    pub fn bytes(&self) -> u64 {
        self.columns.iter().map(|column| column.slot.bytes()).sum()
    }

    /// The name it was reserved under.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How many rows it has.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// How many columns it has.
    pub fn width(&self) -> usize {
        self.columns.len()
    }

    /// The array of a column, in the order of [`reserve`](Self::reserve), and what was [appended](Self::append).
    pub fn column(&self, column: usize) -> Option<&Slot> {
        self.columns.get(column).map(|column| &column.slot)
    }

    /// The same, to write to.
    pub fn column_mut(&mut self, column: usize) -> Option<&mut Slot> {
        self.columns.get_mut(column).map(|column| &mut column.slot)
    }

    pub(crate) fn columns(&self) -> &[Column] {
        &self.columns
    }

    pub(crate) fn columns_mut(&mut self) -> &mut [Column] {
        &mut self.columns
    }
}
