//! What a buffer may hold.

use half::{bf16, f16};
use zero_core::DType;

/// A number that ranks exchange: `f32`, `f64`, `bf16`, `f16`, `i32`, `i64` or `u8`.
///
/// The trait is sealed, so that every backend knows every element type by its [`DType`].
pub trait Element: bytemuck::Pod + Send + Sync + sealed::Sealed + 'static {
    /// The type's name at run time.
    const DTYPE: DType;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! elements {
    ($($element:ty => $dtype:ident),* $(,)?) => {$(
        impl sealed::Sealed for $element {}

        impl Element for $element {
            const DTYPE: DType = DType::$dtype;
        }

        const _: () = assert!(size_of::<$element>() == DType::$dtype.size());
    )*};
}

elements! {
    f64 => F64,
    f32 => F32,
    f16 => F16,
    bf16 => BF16,
    i64 => I64,
    i32 => I32,
    u8 => U8,
}
