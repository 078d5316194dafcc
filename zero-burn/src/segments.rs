//! Where a gradient lies in its bucket.

#[cfg(feature = "cube")]
use std::ops::Range;

use zero_core::{Bucket, DType, ParameterIndex};

#[cfg(feature = "cube")]
use crate::floats::Floats;
use crate::floats::{FloatsMut, Write};
use crate::host::HostTensor;
use crate::scratch::ScratchBuffer;

/// Writes a gradient, times a factor, to where it lies in the bucket; whether all of it was finite.
pub(crate) fn write(
    bucket: &Bucket,
    parameter: ParameterIndex,
    gradient: &HostTensor,
    (wire, buffer): (DType, &mut ScratchBuffer),
    (how, factor): (Write, f32),
) -> bool {
    let mut finite = true;
    for segment in bucket.segments(parameter) {
        let from = gradient.floats().slice(segment.source.clone());
        let to = FloatsMut::new(wire, buffer).slice(segment.offset..segment.offset + from.len());
        finite &= to.write(how, from, factor);
    }
    finite
}

/// Clears the place of a gradient.
pub(crate) fn clear(bucket: &Bucket, parameter: ParameterIndex, (wire, buffer): (DType, &mut ScratchBuffer)) {
    for segment in bucket.segments(parameter) {
        FloatsMut::new(wire, buffer).slice(segment.offset..segment.offset + segment.source.len()).clear();
    }
}

/// Where a gradient lies in the bucket.
#[cfg(feature = "cube")]
pub(crate) fn places(bucket: &Bucket, parameter: ParameterIndex) -> Vec<Range<usize>> {
    let segments = bucket.segments(parameter).iter();
    segments.map(|segment| segment.offset..segment.offset + segment.source.len()).collect()
}

/// Whether a gradient in its bucket is finite.
#[cfg(feature = "cube")]
pub(crate) fn are_finite(
    bucket: &Bucket,
    parameter: ParameterIndex,
    (wire, buffer): (DType, &ScratchBuffer),
) -> bool {
    places(bucket, parameter).into_iter().all(|here| Floats::new(wire, buffer).slice(here).are_finite())
}
