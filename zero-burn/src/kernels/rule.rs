//! What an update does to numbers, in the order in which `zero_offload` rounds.

use cubecl::prelude::*;
use zero_offload::{Coefficients, UpdateRule};

use super::arithmetic::{Fusion, mul_add};
use super::words::opaque;

/// Which rule a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    Adam,
    Adagrad,
    Lion,
    Momentum,
    Descent,
}

impl Kind {
    pub(super) const ALL: [Self; 5] = [Self::Adam, Self::Adagrad, Self::Lion, Self::Momentum, Self::Descent];

    pub(super) const fn states(self) -> usize {
        match self {
            Self::Adam => 2,
            Self::Adagrad | Self::Lion | Self::Momentum => 1,
            Self::Descent => 0,
        }
    }
}

/// Bits of a row's flags: what is there at all. A rate of 0 would not do for what is not, since 0 times infinity is NaN.
const PENALTY: u32 = 1;
const DECAY: u32 = 2;
const AHEAD: u32 = 4;
/// Never set, which no compiler can know.
const NEVER: u32 = 1 << 31;

/// How many words the numbers of an update take.
pub(super) const NUMBERS: usize = 10;

/// The rule of an update, and its numbers in the order in which [`step`] reads them; none if there is no such kernel.
pub(super) fn numbers(coefficients: &Coefficients) -> Option<(Kind, [u32; NUMBERS])> {
    let Coefficients { gradient_factor, penalty, decay, step_size, rule } = *coefficients;
    let mut flags = 0;
    let mut optional = |number: Option<f32>, flag| {
        flags |= if number.is_some() { flag } else { 0 };
        number.unwrap_or(0.0)
    };
    let (penalty, decay) = (optional(penalty, PENALTY), optional(decay, DECAY));
    let (kind, own) = match rule {
        UpdateRule::Adam(rule) => (Kind::Adam, [rule.gain1, rule.beta2, rule.gain2, rule.root, rule.epsilon]),
        UpdateRule::Adagrad(rule) => (Kind::Adagrad, [rule.epsilon, 0.0, 0.0, 0.0, 0.0]),
        UpdateRule::Lion(rule) => (Kind::Lion, [rule.gain1, rule.gain2, 0.0, 0.0, 0.0]),
        UpdateRule::Momentum(rule) => {
            let ahead = optional(rule.ahead, AHEAD);
            (Kind::Momentum, [rule.kept, rule.gain, ahead, 0.0, 0.0])
        }
        UpdateRule::Descent => (Kind::Descent, [0.0; 5]),
        _ => return None,
    };
    let [a, b, c, d, e] = own.map(f32::to_bits);
    let [factor, penalty, decay, step_size] = [gradient_factor, penalty, decay, step_size].map(f32::to_bits);
    Some((kind, [flags, factor, penalty, decay, step_size, a, b, c, d, e]))
}

/// The numbers of an update, read once for many elements.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Numbers<N: Size> {
    flags: u32,
    factor: Vector<f32, N>,
    penalty: Vector<f32, N>,
    decay: Vector<f32, N>,
    step_size: Vector<f32, N>,
    /// The rule's own, in its order.
    a: Vector<f32, N>,
    b: Vector<f32, N>,
    c: Vector<f32, N>,
    d: Vector<f32, N>,
    e: Vector<f32, N>,
}

#[cube]
impl<N: Size> Numbers<N> {
    /// Those at `at` of a table.
    pub(super) fn read(table: &[u32], at: u32) -> Self {
        Numbers::<N> {
            flags: table[at as usize],
            factor: number(table, at + 1),
            penalty: number(table, at + 2),
            decay: number(table, at + 3),
            step_size: number(table, at + 4),
            a: number(table, at + 5),
            b: number(table, at + 6),
            c: number(table, at + 7),
            d: number(table, at + 8),
            e: number(table, at + 9),
        }
    }
}

#[cube]
fn number<N: Size>(table: &[u32], at: u32) -> Vector<f32, N> {
    Vector::new(f32::reinterpret(table[at as usize]))
}

/// The new value and states.
#[cube]
pub(super) fn step<N: Size>(
    numbers: &Numbers<N>,
    value: Vector<f32, N>,
    gradient: Vector<f32, N>,
    first: Vector<f32, N>,
    second: Vector<f32, N>,
    #[comptime] kind: Kind,
    #[comptime] fusion: Fusion,
) -> (Vector<f32, N>, Vector<f32, N>, Vector<f32, N>) {
    let flags = numbers.flags;
    let zero = flags & NEVER;
    let mut gradient = opaque(gradient * numbers.factor, zero);
    if flags & PENALTY != 0 {
        gradient = mul_add(value, numbers.penalty, gradient, fusion);
    }
    let mut direction = gradient;
    let mut new_first = first;
    let mut new_second = second;
    if comptime!(kind == Kind::Adam) {
        new_first = mul_add(gradient - first, numbers.a, first, fusion);
        let kept = opaque(second * numbers.b, zero);
        let gained = opaque(gradient * numbers.c, zero);
        new_second = mul_add(gained, gradient, kept, fusion);
        let divisor = mul_add(new_second.sqrt(), numbers.d, numbers.e, fusion);
        direction = new_first / divisor;
    }
    if comptime!(kind == Kind::Adagrad) {
        new_first = mul_add(gradient, gradient, first, fusion);
        direction = gradient / (new_first.sqrt() + numbers.a);
    }
    if comptime!(kind == Kind::Lion) {
        let difference = gradient - first;
        direction = sign(mul_add(difference, numbers.a, first, fusion));
        new_first = mul_add(difference, numbers.b, first, fusion);
    }
    if comptime!(kind == Kind::Momentum) {
        let gained = opaque(gradient * numbers.b, zero);
        new_first = mul_add(first, numbers.a, gained, fusion);
        direction = new_first;
        if flags & AHEAD != 0 {
            direction = mul_add(new_first, numbers.c, gradient, fusion);
        }
    }
    let size = numbers.step_size;
    let mut new_value = mul_add(direction, -size, value, fusion);
    if flags & DECAY != 0 {
        let decayed = opaque(value * numbers.decay, zero);
        new_value = value - mul_add(direction, size, decayed, fusion);
    }
    (new_value, new_first, new_second)
}

/// 1 or -1 by the sign of each number; zeros and NaN stay what they are.
#[cube]
fn sign<N: Size>(numbers: Vector<f32, N>) -> Vector<f32, N> {
    let mut signs = Vector::<f32, N>::empty();
    #[unroll]
    for at in 0..N::value() {
        let bits = u32::reinterpret(numbers.extract(at));
        let magnitude = bits & 0x7fff_ffff;
        let stays = magnitude == 0 || magnitude > 0x7f80_0000;
        signs.insert(at, f32::reinterpret(select(stays, bits, (bits & 0x8000_0000) | 0x3f80_0000)));
    }
    signs
}
