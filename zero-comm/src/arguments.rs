//! What can be wrong with the arguments of an operation, whatever the other ranks do.

use zero_core::{DType, Rank, WorldSize};

use crate::request::Request;
use crate::{Buffer, BufferMut, ReduceOp};

/// A rank's place in its group, against which arguments are checked.
///
/// Each method makes the [`Request`] of one operation, or says what is wrong and what would be right.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// The rank within the group.
    pub(crate) position: usize,
    pub(crate) size: WorldSize,
}

/// A named argument: its length in elements, and their type.
pub(crate) struct Argument {
    pub(crate) name: &'static str,
    pub(crate) length: usize,
    pub(crate) dtype: DType,
}

impl Argument {
    pub(crate) const fn new(name: &'static str, length: usize, dtype: DType) -> Self {
        Self { name, length, dtype }
    }
}

impl Place {
    pub(crate) fn all_reduce(self, buffer: &BufferMut<'_>, op: ReduceOp) -> Result<Request, String> {
        check_op(op, buffer.dtype())?;
        Ok(Request::AllReduce { dtype: buffer.dtype(), length: buffer.len(), op })
    }

    pub(crate) fn all_gather(
        self,
        send: &Buffer<'_>,
        receive: &BufferMut<'_>,
        counts: &[usize],
    ) -> Result<Request, String> {
        let whole = Argument::new("receive", receive.len(), receive.dtype());
        self.check_parts(counts, &whole, &Argument::new("send", send.len(), send.dtype()))?;
        Ok(Request::AllGather { dtype: send.dtype(), counts: counts.to_vec() })
    }

    pub(crate) fn reduce_scatter(
        self,
        send: &Buffer<'_>,
        receive: &BufferMut<'_>,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<Request, String> {
        let whole = Argument::new("send", send.len(), send.dtype());
        self.check_parts(counts, &whole, &Argument::new("receive", receive.len(), receive.dtype()))?;
        check_op(op, send.dtype())?;
        Ok(Request::ReduceScatter { dtype: send.dtype(), counts: counts.to_vec(), op })
    }

    /// `root` is a rank of the group; `members` are the group's ranks in the world.
    pub(crate) fn broadcast(
        self,
        buffer: &BufferMut<'_>,
        root: Rank,
        members: &[Rank],
    ) -> Result<Request, String> {
        let root = members[self.member("root", root)?];
        Ok(Request::Broadcast { dtype: buffer.dtype(), length: buffer.len(), root })
    }

    pub(crate) fn all_to_all(
        self,
        send: &Buffer<'_>,
        send_counts: &[usize],
        receive: &BufferMut<'_>,
        receive_counts: &[usize],
    ) -> Result<Request, String> {
        let dtype = send.dtype();
        self.check_counts("send counts", send_counts, "send", send.len())?;
        self.check_counts("receive counts", receive_counts, "receive", receive.len())?;
        if receive.dtype() != dtype {
            return Err(format!("receive is of {}, but send of {dtype}", receive.dtype()));
        }
        let (out, back) = (send_counts[self.position], receive_counts[self.position]);
        if out != back {
            return Err(format!("the rank sends itself {out} elements, but receives {back} from itself"));
        }
        Ok(Request::AllToAll { dtype, send: send_counts.to_vec(), receive: receive_counts.to_vec() })
    }

    /// The position of `rank`, which `what` names.
    pub(crate) fn member(self, what: &str, rank: Rank) -> Result<usize, String> {
        if self.size.contains(rank) {
            Ok(rank.index())
        } else {
            Err(format!("{what} is {rank}, but the group has ranks 0 to {}", self.size.get() - 1))
        }
    }

    /// As [`member`](Self::member), for another rank than this.
    pub(crate) fn other(self, what: &str, rank: Rank) -> Result<usize, String> {
        match self.member(what, rank)? {
            position if position == self.position => {
                Err("a rank cannot send to itself; copy the data".to_owned())
            }
            position => Ok(position),
        }
    }

    /// Checks that `whole` is cut into one part per rank by `counts`, and that this rank's is `part`.
    pub(crate) fn check_parts(
        self,
        counts: &[usize],
        whole: &Argument,
        part: &Argument,
    ) -> Result<(), String> {
        self.check_counts("counts", counts, whole.name, whole.length)?;
        if part.dtype != whole.dtype {
            return Err(format!("{} is of {}, but {} of {}", part.name, part.dtype, whole.name, whole.dtype));
        }
        let count = counts[self.position];
        if part.length != count {
            return Err(format!(
                "{} has {} elements, but this rank's count is {count}",
                part.name, part.length
            ));
        }
        Ok(())
    }

    fn check_counts(self, what: &str, counts: &[usize], whole: &str, length: usize) -> Result<(), String> {
        if counts.len() != self.size.get() {
            return Err(format!("there are {} {what}, but the group has {} ranks", counts.len(), self.size));
        }
        match counts.iter().try_fold(0_usize, |sum, count| sum.checked_add(*count)) {
            Some(sum) if sum == length => Ok(()),
            Some(sum) => Err(format!("{whole} has {length} elements, but {what} add up to {sum}")),
            None => Err(format!("{what} add up to more than memory can hold")),
        }
    }
}

pub(crate) fn check_op(op: ReduceOp, dtype: DType) -> Result<(), String> {
    if dtype.is_integer() && op == ReduceOp::Mean {
        return Err(format!("the mean of {dtype} is not an integer; sum and divide, or use floats"));
    }
    Ok(())
}
