//! Columns of text, folded to the width of the terminal. A line of columns is drawn by the table that `ringferry ctl` has; what is
//! decided here is which columns are worth showing, which side each stands on, and where the table is folded.

use std::io::IsTerminal;

use ringferry_control::text;

/// A column that is shown.
#[derive(Clone, Copy)]
struct Column {
    /// Index of its cells.
    at: usize,
    /// Characters of its widest cell.
    width: usize,
    /// True if it is aligned right.
    right: bool,
}

/// Cells in rows; the first row is the header.
#[derive(Clone, Debug, Default)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with a header.
    pub fn new(header: &[&str]) -> Self {
        Self { rows: vec![header.iter().map(|cell| (*cell).to_owned()).collect()] }
    }

    pub fn push(&mut self, row: Vec<String>) {
        self.rows.push(row);
    }

    /// Returns true if there is nothing but the header.
    pub fn is_empty(&self) -> bool {
        self.rows.len() < 2
    }

    /// The lines, for standard output: folded to the width of a terminal, as wide as they are elsewhere.
    pub fn draw(&self) -> String {
        let stdout = std::io::stdout();
        let terminal = stdout.is_terminal().then(|| rustix::termios::tcgetwinsize(&stdout).ok()).flatten();
        // A terminal that does not know its width says 0.
        let width = terminal.map(|size| usize::from(size.ws_col)).filter(|columns| *columns > 0);
        self.folded(width.unwrap_or(usize::MAX))
    }

    /// The lines, indented by two; columns without any content are left out. Numbers, and what begins
    /// like one, stand to the right. Columns that do not fit into the width are drawn below, after the
    /// first column once more.
    fn folded(&self, width: usize) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let cell = |row: &Vec<String>, at: usize| row.get(at).cloned().unwrap_or_default();
        let shown: Vec<Column> = (0..columns)
            .filter(|at| self.rows[1..].iter().any(|row| !cell(row, *at).is_empty()))
            .map(|at| Column {
                at,
                width: self.rows.iter().map(|row| cell(row, at).chars().count()).max().unwrap_or(0),
                right: self.rows[1..].iter().all(|row| numeric(&cell(row, at))),
            })
            .collect();
        let Some((first, others)) = shown.split_first() else { return String::new() };
        // Two characters in front of each column.
        let room = width.saturating_sub(first.width + 2);
        let mut blocks = vec![vec![*first]];
        let mut used = 0;
        for column in others {
            if used > 0 && used + column.width + 2 > room {
                blocks.push(vec![*first]);
                used = 0;
            }
            used += column.width + 2;
            blocks.last_mut().expect("there is one from the start").push(*column);
        }
        let blocks: Vec<String> = blocks.iter().map(|columns| self.block(columns)).collect();
        blocks.join("\n")
    }

    /// These columns of all rows, as `ringferry ctl` draws its tables, indented.
    fn block(&self, columns: &[Column]) -> String {
        let cells = |row: &[String]| -> Vec<String> {
            columns.iter().map(|column| row.get(column.at).cloned().unwrap_or_default()).collect()
        };
        let (header, rows) = self.rows.split_first().expect("a table has a header");
        let headings: Vec<String> = std::iter::zip(columns, cells(header))
            .map(|(column, heading)| format!("{}{heading}", if column.right { '>' } else { '<' }))
            .collect();
        let mut table = text::Table::new(&headings.iter().map(String::as_str).collect::<Vec<_>>());
        rows.iter().for_each(|row| table.row(cells(row)));
        table.to_string().lines().map(|line| format!("  {line}\n")).collect()
    }
}

fn numeric(cell: &str) -> bool {
    cell.is_empty() || cell.starts_with(|first: char| first.is_ascii_digit() || "+-".contains(first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_empty_ones_left_out() {
        let mut table = Table::new(&["name", "value", "note", "nothing"]);
        table.push(vec!["a".into(), "1.5".into(), "x".into(), String::new()]);
        table.push(vec!["long name".into(), "-12".into()]);
        assert_eq!(
            table.folded(usize::MAX),
            "  name       value  note\n  a            1.5  x\n  long name    -12\n"
        );
        assert!(!table.is_empty() && Table::new(&["a"]).is_empty());
    }
    #[test]
    fn columns_that_do_not_fit_are_drawn_below_with_their_rows_names() {
        let mut table = Table::new(&["row", "one", "two", "three"]);
        table.push(vec!["first".into(), "111".into(), "222".into(), "333333".into()]);
        let folded = "  row    one  two\n  first  111  222\n\n  row     three\n  first  333333\n";
        assert_eq!(table.folded(17), folded);
        assert_eq!(table.folded(18), folded);
        assert_eq!(table.folded(25), "  row    one  two   three\n  first  111  222  333333\n");
        // However narrow, a column at a time.
        assert_eq!(table.folded(0).lines().filter(|line| line.starts_with("  row")).count(), 3);
    }
}
