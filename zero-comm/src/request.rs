//! An operation with its arguments, and whether those of several ranks fit together.

use serde::{Deserialize, Serialize};
use zero_core::{DType, Rank};

use crate::{OpKind, ReduceOp};

/// An operation with all its arguments but the data. Lengths and counts are in elements.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Request {
    AllReduce { dtype: DType, length: usize, op: ReduceOp },
    AllGather { dtype: DType, counts: Vec<usize> },
    ReduceScatter { dtype: DType, counts: Vec<usize>, op: ReduceOp },
    Broadcast { dtype: DType, length: usize, root: Rank },
    AllToAll { dtype: DType, send: Vec<usize>, receive: Vec<usize> },
    Barrier,
    Fence,
    Split { color: Option<u64>, key: u64 },
    Send { dtype: DType, length: usize },
    Receive { dtype: DType, length: usize },
}

impl Request {
    pub(crate) const fn kind(&self) -> OpKind {
        match self {
            Self::AllReduce { .. } => OpKind::AllReduce,
            Self::AllGather { .. } => OpKind::AllGather,
            Self::ReduceScatter { .. } => OpKind::ReduceScatter,
            Self::Broadcast { .. } => OpKind::Broadcast,
            Self::AllToAll { .. } => OpKind::AllToAll,
            Self::Barrier => OpKind::Barrier,
            Self::Fence => OpKind::Fence,
            Self::Split { .. } => OpKind::Split,
            Self::Send { .. } => OpKind::Send,
            Self::Receive { .. } => OpKind::Receive,
        }
    }

    /// Whether two requests of one operation are equal; otherwise each side has arguments of its own.
    pub(crate) const fn is_uniform(&self) -> bool {
        !matches!(self, Self::AllToAll { .. } | Self::Split { .. } | Self::Send { .. } | Self::Receive { .. })
    }

    /// The element type and number, for the record.
    pub(crate) fn elements(&self) -> Option<(DType, usize)> {
        match self {
            Self::AllReduce { dtype, length, .. }
            | Self::Broadcast { dtype, length, .. }
            | Self::Send { dtype, length }
            | Self::Receive { dtype, length } => Some((*dtype, *length)),
            Self::AllGather { dtype, counts } | Self::ReduceScatter { dtype, counts, .. } => {
                Some((*dtype, counts.iter().sum()))
            }
            Self::AllToAll { dtype, send, .. } => Some((*dtype, send.iter().sum())),
            Self::Barrier | Self::Fence | Self::Split { .. } => None,
        }
    }

    /// How many elements this rank sends to each, in an all-to-all.
    pub(crate) fn send_counts(&self) -> &[usize] {
        match self {
            Self::AllToAll { send, .. } => send,
            _ => &[],
        }
    }

    /// The arguments as text, for an error.
    pub(crate) fn arguments(&self) -> String {
        match self {
            Self::AllReduce { dtype, length, op } => format!("{op}, {length} x {dtype}"),
            Self::AllGather { dtype, counts } => format!("{counts:?} x {dtype}"),
            Self::ReduceScatter { dtype, counts, op } => format!("{op}, {counts:?} x {dtype}"),
            Self::Broadcast { dtype, length, root } => format!("from {root}, {length} x {dtype}"),
            Self::AllToAll { dtype, send, receive } => {
                format!("{send:?} x {dtype} out, {receive:?} x {dtype} in")
            }
            Self::Barrier | Self::Fence | Self::Split { .. } => String::new(),
            Self::Send { dtype, length } | Self::Receive { dtype, length } => format!("{length} x {dtype}"),
        }
    }

    /// Whether `self`, of the rank in seat `here`, and `other`, of the rank in seat `there`, are two sides of
    /// one operation.
    fn agrees(&self, here: usize, other: &Self, there: usize) -> bool {
        match (self, other) {
            (Self::Split { .. }, Self::Split { .. }) => true,
            (
                Self::AllToAll { dtype, send, receive },
                Self::AllToAll { dtype: dtype_there, send: send_there, receive: receive_there },
            ) => {
                dtype == dtype_there
                    && send.get(there) == receive_there.get(here)
                    && receive.get(there) == send_there.get(here)
            }
            (Self::Send { dtype, length }, Self::Receive { dtype: dtype_there, length: length_there }) => {
                dtype == dtype_there && length == length_there
            }
            _ => self == other,
        }
    }
}

/// Two seats whose requests or labels do not fit together, if there are any. Seats are in rank order.
pub(crate) fn disagreement(seats: &[(&Request, &str)]) -> Option<(usize, usize)> {
    let named = seats.iter().position(|(_, label)| !label.is_empty());
    for (there, (request, label)) in seats.iter().enumerate().skip(1) {
        if !seats[0].0.agrees(0, request, there) {
            return Some((0, there));
        }
        if let Some(here) = named.filter(|here| !label.is_empty() && seats[*here].1 != *label) {
            return Some((here, there));
        }
    }
    // Only the counts of an all-to-all differ from pair to pair.
    if matches!(seats[0].0, Request::AllToAll { .. }) {
        for (here, (request, _)) in seats.iter().enumerate() {
            for (there, (other, _)) in seats.iter().enumerate().skip(here + 1) {
                if !request.agrees(here, other, there) {
                    return Some((here, there));
                }
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exchange(send: &[usize], receive: &[usize]) -> Request {
        Request::AllToAll { dtype: DType::F32, send: send.into(), receive: receive.into() }
    }

    #[test]
    fn an_exchange_whose_counts_differ_between_two_later_ranks_is_found() {
        let requests = [
            exchange(&[0, 1, 2], &[0, 3, 4]),
            exchange(&[3, 0, 5], &[1, 0, 6]),
            exchange(&[4, 7, 0], &[2, 5, 0]),
        ];
        let seats: Vec<_> = requests.iter().map(|request| (request, "")).collect();
        assert_eq!(disagreement(&seats), Some((1, 2)));
    }

    #[test]
    fn an_unlabelled_call_agrees_with_any_label_but_two_labels_must_be_equal() {
        let barrier = Request::Barrier;
        let at = |labels: [&'static str; 3]| disagreement(&labels.map(|label| (&barrier, label)));
        assert_eq!(at(["", "a", "a"]), None);
        assert_eq!(at(["", "a", "b"]), Some((1, 2)));
        assert_eq!(at(["a", "", "b"]), Some((0, 2)));
    }
}
