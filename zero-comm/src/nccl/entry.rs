//! One operation of a group, without its memory.

use zero_core::DType;

use crate::request::Request;
use crate::{OpKind, ReduceOp};

/// An operation with all its arguments but the memory.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) request: Request,
    pub(super) label: String,
    /// The position of the root of a broadcast, or of the other side of a message; otherwise of no meaning.
    pub(super) partner: usize,
}

/// One function call of NCCL. Addresses are of the device; what is not used is 0.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Primitive {
    pub(super) kind: PrimitiveKind,
    pub(super) from: u64,
    pub(super) into: u64,
    /// In elements; of one part where ranks have parts.
    pub(super) count: usize,
    pub(super) dtype: DType,
}

/// A function of NCCL. Roots and peers are positions in the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PrimitiveKind {
    AllReduce(ReduceOp),
    AllGather,
    ReduceScatter(ReduceOp),
    Broadcast { root: usize },
    Reduce { op: ReduceOp, root: usize },
    Send { to: usize },
    Receive { from: usize },
}

impl Entry {
    pub(super) const fn kind(&self) -> OpKind {
        self.request.kind()
    }

    /// Whether it is a message from one rank to another, in which the others take no part.
    pub(super) const fn is_message(&self) -> bool {
        matches!(self.request, Request::Send { .. } | Request::Receive { .. })
    }

    /// The calls that do it on the rank at `position`, with what is sent at `from` and what is received at
    /// `into`. Nothing is called for no elements.
    pub(super) fn primitives(&self, position: usize, from: u64, into: u64) -> Vec<Primitive> {
        let partner = self.partner;
        let one = |kind, count, dtype| vec![Primitive { kind, from, into, count, dtype }];
        // What is read and written in place is given to be written.
        let in_place = |kind, count, dtype| vec![Primitive { kind, from: into, into, count, dtype }];
        let mut calls = match &self.request {
            Request::AllReduce { dtype, length, op } => {
                in_place(PrimitiveKind::AllReduce(*op), *length, *dtype)
            }
            Request::AllGather { dtype, counts } if even(counts) => {
                one(PrimitiveKind::AllGather, counts[position], *dtype)
            }
            Request::ReduceScatter { dtype, counts, op } if even(counts) => {
                one(PrimitiveKind::ReduceScatter(*op), counts[position], *dtype)
            }
            // NCCL knows equal parts only; of unequal ones, each has a rank it comes from or goes to.
            Request::AllGather { dtype, counts } => parts(counts, *dtype)
                .map(|(root, count, start)| Primitive {
                    kind: PrimitiveKind::Broadcast { root },
                    from: if root == position { from } else { into + start },
                    into: into + start,
                    count,
                    dtype: *dtype,
                })
                .collect(),
            Request::ReduceScatter { dtype, counts, op } => parts(counts, *dtype)
                .map(|(root, count, start)| Primitive {
                    kind: PrimitiveKind::Reduce { op: *op, root },
                    from: from + start,
                    into: if root == position { into } else { 0 },
                    count,
                    dtype: *dtype,
                })
                .collect(),
            Request::Broadcast { dtype, length, .. } => {
                in_place(PrimitiveKind::Broadcast { root: partner }, *length, *dtype)
            }
            Request::Send { dtype, length } => one(PrimitiveKind::Send { to: partner }, *length, *dtype),
            Request::Receive { dtype, length } => {
                one(PrimitiveKind::Receive { from: partner }, *length, *dtype)
            }
            Request::AllToAll { .. } | Request::Barrier | Request::Fence | Request::Split { .. } => {
                Vec::new()
            }
        };
        calls.retain(|call| call.count > 0);
        calls
    }
}

fn even(counts: &[usize]) -> bool {
    counts.windows(2).all(|pair| pair[0] == pair[1])
}

/// The rank, length in elements and first byte of each part.
fn parts(counts: &[usize], dtype: DType) -> impl Iterator<Item = (usize, usize, u64)> {
    counts.iter().enumerate().scan(0, move |next, (rank, count)| {
        let start = *next;
        *next += (count * dtype.size()) as u64;
        Some((rank, *count, start))
    })
}

#[cfg(test)]
mod tests {
    use zero_core::Rank;

    use super::*;

    /// The calls on the rank at position 1, with what is sent at 1000 and what is received at 2000.
    fn calls(request: Request, partner: usize) -> Vec<(PrimitiveKind, u64, u64, usize)> {
        let entry = Entry { request, label: String::new(), partner };
        let calls = entry.primitives(1, 1000, 2000);
        calls.into_iter().map(|call| (call.kind, call.from, call.into, call.count)).collect()
    }

    const DTYPE: DType = DType::F32;

    #[test]
    fn what_works_in_place_reads_what_it_writes() {
        let op = ReduceOp::Sum;
        let all_reduce = Request::AllReduce { dtype: DTYPE, length: 7, op };
        assert_eq!(calls(all_reduce, 0), [(PrimitiveKind::AllReduce(op), 2000, 2000, 7)]);
        let broadcast = Request::Broadcast { dtype: DTYPE, length: 7, root: Rank::new(12) };
        assert_eq!(calls(broadcast, 2), [(PrimitiveKind::Broadcast { root: 2 }, 2000, 2000, 7)]);
    }

    #[test]
    fn equal_parts_are_one_call() {
        let gather = Request::AllGather { dtype: DTYPE, counts: vec![3; 4] };
        assert_eq!(calls(gather, 0), [(PrimitiveKind::AllGather, 1000, 2000, 3)]);
        let op = ReduceOp::Max;
        let scatter = Request::ReduceScatter { dtype: DTYPE, counts: vec![3; 4], op };
        assert_eq!(calls(scatter, 0), [(PrimitiveKind::ReduceScatter(op), 1000, 2000, 3)]);
    }

    #[test]
    fn unequal_parts_are_a_call_each_unless_empty() {
        let counts = vec![2, 3, 0, 1];
        let gather = Request::AllGather { dtype: DTYPE, counts: counts.clone() };
        let root = |root| PrimitiveKind::Broadcast { root };
        let expected = [(root(0), 2000, 2000, 2), (root(1), 1000, 2008, 3), (root(3), 2020, 2020, 1)];
        assert_eq!(calls(gather, 0), expected);
        let op = ReduceOp::Mean;
        let scatter = Request::ReduceScatter { dtype: DTYPE, counts, op };
        let root = |root| PrimitiveKind::Reduce { op, root };
        let expected = [(root(0), 1000, 0, 2), (root(1), 1008, 2000, 3), (root(3), 1020, 0, 1)];
        assert_eq!(calls(scatter, 0), expected);
    }

    #[test]
    fn no_elements_are_no_call() {
        assert_eq!(calls(Request::AllReduce { dtype: DTYPE, length: 0, op: ReduceOp::Sum }, 0), []);
        assert_eq!(calls(Request::AllGather { dtype: DTYPE, counts: vec![0; 3] }, 0), []);
        assert_eq!(calls(Request::Send { dtype: DTYPE, length: 0 }, 2), []);
    }

    #[test]
    fn messages_name_the_other_side() {
        let send = Request::Send { dtype: DTYPE, length: 4 };
        assert_eq!(calls(send, 2), [(PrimitiveKind::Send { to: 2 }, 1000, 2000, 4)]);
        let receive = Request::Receive { dtype: DTYPE, length: 4 };
        assert_eq!(calls(receive, 0), [(PrimitiveKind::Receive { from: 0 }, 1000, 2000, 4)]);
    }
}
