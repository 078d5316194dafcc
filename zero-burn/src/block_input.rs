//! What a block takes: a tensor, several of them, or some that may be absent.

use burn::tensor::{Bool, Device, Int, Tensor};

/// What [`recompute`](crate::recompute) hands to a block: a tensor of any kind, an option of one, or a tuple of up to four of
/// these.
///
/// ```
/// # use burn::tensor::{Bool, Tensor};
/// # use zero_burn::BlockInput;
/// fn takes<T: BlockInput>() {}
/// takes::<(Tensor<3>, Option<Tensor<2, Bool>>)>();
/// ```
///
/// Tuples are not nested:
///
/// ```compile_fail
/// # use burn::tensor::{Bool, Tensor};
/// # use zero_burn::BlockInput;
/// # fn takes<T: BlockInput>() {}
/// takes::<((Tensor<3>, Tensor<3>), Tensor<3>)>();
/// ```
pub trait BlockInput: sealed::Floats {}

impl<T: sealed::Floats> BlockInput for T {}

pub(crate) use sealed::{FloatMap, Floats, Member};

mod sealed {
    use super::{Device, Tensor};

    /// A function of tensors of floats of any rank.
    pub trait FloatMap {
        fn map<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D>;
    }

    /// Something with tensors of floats in it.
    pub trait Floats: Clone + Send + 'static {
        /// `map` of each tensor of floats, in order; all else as it is.
        #[must_use]
        fn map_floats<F: FloatMap>(self, map: &mut F) -> Self;

        /// Where the first tensor is, of whatever kind.
        fn first_device(&self) -> Option<Device>;
    }

    /// What may be in a tuple: at most one tensor.
    pub trait Member: Floats {}
}

impl<const D: usize> Member for Tensor<D> {}
impl<const D: usize> Member for Tensor<D, Int> {}
impl<const D: usize> Member for Tensor<D, Bool> {}
impl<T: Member> Member for Option<T> {}

impl<const D: usize> Floats for Tensor<D> {
    fn map_floats<F: FloatMap>(self, map: &mut F) -> Self {
        map.map(self)
    }

    fn first_device(&self) -> Option<Device> {
        Some(self.device())
    }
}

macro_rules! no_floats {
    ($kind:ty) => {
        impl<const D: usize> Floats for Tensor<D, $kind> {
            fn map_floats<F: FloatMap>(self, _map: &mut F) -> Self {
                self
            }

            fn first_device(&self) -> Option<Device> {
                Some(self.device())
            }
        }
    };
}

no_floats!(Int);
no_floats!(Bool);

impl<T: Member> Floats for Option<T> {
    fn map_floats<F: FloatMap>(self, map: &mut F) -> Self {
        self.map(|tensor| tensor.map_floats(map))
    }

    fn first_device(&self) -> Option<Device> {
        self.as_ref()?.first_device()
    }
}

macro_rules! tuple {
    ($($member:ident $index:tt),+) => {
        impl<$($member: Member),+> Floats for ($($member,)+) {
            fn map_floats<F: FloatMap>(self, map: &mut F) -> Self {
                ($(self.$index.map_floats(map),)+)
            }

            fn first_device(&self) -> Option<Device> {
                [$(self.$index.first_device()),+].into_iter().flatten().next()
            }
        }
    };
}

tuple!(A 0);
tuple!(A 0, B 1);
tuple!(A 0, B 1, C 2);
tuple!(A 0, B 1, C 2, E 3);
