//! Slices of numbers whose type is known at run time.

use std::fmt;

use half::{bf16, f16};
use zero_core::DType;

use crate::workers::Split;

macro_rules! floats {
    ($(#[$doc:meta])* $name:ident, $($mutable:tt)?) => {
        $(#[$doc])*
        pub enum $name<'a> {
            /// IEEE 754 binary32.
            F32(&'a $($mutable)? [f32]),
            /// bfloat16, the upper half of a binary32.
            Bf16(&'a $($mutable)? [bf16]),
            /// IEEE 754 binary16.
            F16(&'a $($mutable)? [f16]),
        }

        impl $name<'_> {
            /// The number of elements.
            pub const fn len(&self) -> usize {
                match self {
                    Self::F32(values) => values.len(),
                    Self::Bf16(values) => values.len(),
                    Self::F16(values) => values.len(),
                }
            }

            /// Whether there are no elements.
            pub const fn is_empty(&self) -> bool {
                self.len() == 0
            }

            /// Sets the first of `to` to these numbers; there are no more of them than it has elements.
            #[inline(always)]
            pub(crate) fn read(&self, to: &mut [f32]) {
                match self {
                    Self::F32(values) => to[..values.len()].copy_from_slice(values),
                    Self::Bf16(values) => {
                        for (to, value) in to.iter_mut().zip(values.iter()) {
                            *to = value.to_f32();
                        }
                    }
                    Self::F16(values) => {
                        for (to, value) in to.iter_mut().zip(values.iter()) {
                            *to = value.to_f32();
                        }
                    }
                }
            }

            /// The type of an element.
            pub const fn dtype(&self) -> DType {
                match self {
                    Self::F32(_) => DType::F32,
                    Self::Bf16(_) => DType::BF16,
                    Self::F16(_) => DType::F16,
                }
            }
        }

        impl<'a> From<&'a $($mutable)? [f32]> for $name<'a> {
            fn from(values: &'a $($mutable)? [f32]) -> Self {
                Self::F32(values)
            }
        }

        impl<'a> From<&'a $($mutable)? [bf16]> for $name<'a> {
            fn from(values: &'a $($mutable)? [bf16]) -> Self {
                Self::Bf16(values)
            }
        }

        impl<'a> From<&'a $($mutable)? [f16]> for $name<'a> {
            fn from(values: &'a $($mutable)? [f16]) -> Self {
                Self::F16(values)
            }
        }

        impl fmt::Debug for $name<'_> {
            // Contents are training state: large, and of no use in a log.
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let mut form = f.debug_struct(stringify!($name));
                form.field("dtype", &self.dtype()).field("len", &self.len()).finish_non_exhaustive()
            }
        }
    };
}

floats! {
    /// Numbers to read, of one of the types that training keeps on the host.
    #[derive(Clone, Copy)]
    Floats,
}

floats! {
    /// Numbers to change, of one of the types that training keeps on the host.
    FloatsMut, mut
}

impl Default for FloatsMut<'_> {
    /// No numbers.
    fn default() -> Self {
        Self::F32(&mut [])
    }
}

impl FloatsMut<'_> {
    /// The same numbers for a shorter time.
    pub fn reborrow(&mut self) -> FloatsMut<'_> {
        match self {
            Self::F32(values) => FloatsMut::F32(values),
            Self::Bf16(values) => FloatsMut::Bf16(values),
            Self::F16(values) => FloatsMut::F16(values),
        }
    }

    /// Sets these numbers to the first of `from`, rounded to the nearest even.
    #[inline(always)]
    pub(crate) fn write(&mut self, from: &[f32]) {
        match self {
            Self::F32(values) => values.copy_from_slice(&from[..values.len()]),
            Self::Bf16(values) => {
                for (value, from) in values.iter_mut().zip(from) {
                    *value = bf16::from_f32(*from);
                }
            }
            Self::F16(values) => {
                for (value, from) in values.iter_mut().zip(from) {
                    *value = f16::from_f32(*from);
                }
            }
        }
    }
}

impl Floats<'_> {
    /// Where the first number is that is infinite or NaN.
    pub(crate) fn position_non_finite(&self) -> Option<usize> {
        match self {
            Self::F32(values) => values.iter().position(|value| !value.is_finite()),
            Self::Bf16(values) => values.iter().position(|value| !value.is_finite()),
            Self::F16(values) => values.iter().position(|value| !value.is_finite()),
        }
    }
}

impl Split for Floats<'_> {
    fn len(&self) -> usize {
        self.len()
    }

    fn split(self, at: usize) -> (Self, Self) {
        fn halves<'a, T>(values: &'a [T], at: usize) -> (Floats<'a>, Floats<'a>)
        where
            Floats<'a>: From<&'a [T]>,
        {
            let (left, right) = values.split_at(at);
            (left.into(), right.into())
        }
        match self {
            Self::F32(values) => halves(values, at),
            Self::Bf16(values) => halves(values, at),
            Self::F16(values) => halves(values, at),
        }
    }
}

impl Split for FloatsMut<'_> {
    fn len(&self) -> usize {
        self.len()
    }

    fn split(self, at: usize) -> (Self, Self) {
        fn halves<'a, T>(values: &'a mut [T], at: usize) -> (FloatsMut<'a>, FloatsMut<'a>)
        where
            FloatsMut<'a>: From<&'a mut [T]>,
        {
            let (left, right) = values.split_at_mut(at);
            (left.into(), right.into())
        }
        match self {
            Self::F32(values) => halves(values, at),
            Self::Bf16(values) => halves(values, at),
            Self::F16(values) => halves(values, at),
        }
    }
}
