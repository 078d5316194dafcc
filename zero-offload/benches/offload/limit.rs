//! The limit that memory sets: a kernel that reads and writes the same streams as a step, and computes next to nothing.

use std::time::Instant;

use zero_offload::{HostBuffer, HostPool};

use crate::adamw::Task;

/// Streams of its own, as many as a step has, and as many threads.
pub(crate) struct Limit {
    threads: usize,
    singles: [HostBuffer; 4],
    halves: [HostBuffer; 2],
}

/// What a thread moves.
struct Part<'a> {
    task: Task,
    /// Read and written, as parameters and states are.
    changed: [&'a mut [f32]; 3],
    single: &'a [f32],
    half: &'a [u16],
    copy: &'a mut [u16],
}

impl Limit {
    pub(crate) fn new(elements: usize, threads: usize) -> Self {
        let pool = HostPool::default();
        let take = |bytes| {
            let mut buffer = pool.take(bytes);
            buffer.fill(0x3F);
            buffer
        };
        let singles = [(); 4].map(|()| take(4 * elements));
        Self { threads, singles, halves: [(); 2].map(|()| take(2 * elements)) }
    }

    /// Seconds of moving what a step of the task does.
    pub(crate) fn seconds(&mut self, task: Task) -> f64 {
        self.step(task);
        let start = Instant::now();
        for _ in 0..2 {
            self.step(task);
        }
        start.elapsed().as_secs_f64() / 2.0
    }

    fn step(&mut self, task: Task) {
        let Self { threads, singles: [a, b, c, single], halves: [half, copy] } = self;
        let length = (single.len() / 4).div_ceil(*threads);
        let [a, b, c] = [a, b, c].map(|buffer| buffer.as_mut_slice().chunks_mut(length));
        let read = single.as_slice().chunks(length).zip(half.as_slice().chunks(length));
        let copies = copy.as_mut_slice().chunks_mut(length);
        std::thread::scope(|scope| {
            for ((((a, b), c), (single, half)), copy) in a.zip(b).zip(c).zip(read).zip(copies) {
                let part = Part { task, changed: [a, b, c], single, half, copy };
                scope.spawn(|| part.work());
            }
        });
    }
}

impl Part<'_> {
    /// With the widest registers there are: lines that are written by halves take several times as long.
    #[cfg(target_arch = "x86_64")]
    fn work(self) {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
        fn with_avx512(part: Part<'_>) {
            part.pass();
        }
        #[target_feature(enable = "avx2")]
        fn with_avx2(part: Part<'_>) {
            part.pass();
        }
        let has_avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl");
        if has_avx512 {
            // SAFETY: the machine has the instructions, as was just asked.
            unsafe { with_avx512(self) }
        } else if is_x86_feature_detected!("avx2") {
            // SAFETY: as above.
            unsafe { with_avx2(self) }
        } else {
            self.pass();
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn work(self) {
        self.pass();
    }

    #[inline(always)]
    fn pass(self) {
        let Self { task, changed, single, half, copy } = self;
        let bits = |value: &u16| f32::from_bits(u32::from(*value) << 16);
        match (task.half_gradient, task.copy) {
            (true, _) => {
                if task.whole {
                    std::hint::black_box(half.iter().fold(0, |all, value| all ^ value));
                }
                move_all(changed, half, bits, copy);
            }
            (false, true) => {
                if task.whole {
                    std::hint::black_box(single.iter().fold(0, |all, value| all ^ value.to_bits()));
                }
                move_all(changed, single, |value| *value, copy);
            }
            (false, false) => move_all(changed, single, |value| *value, &mut []),
        }
    }
}

/// Reads and writes three streams, reads a fourth, and writes `copy` if there is any.
#[inline(always)]
fn move_all<T>([a, b, c]: [&mut [f32]; 3], from: &[T], value: impl Fn(&T) -> f32, copy: &mut [u16]) {
    let len = a.len();
    let (b, c, from) = (&mut b[..len], &mut c[..len], &from[..len]);
    if copy.is_empty() {
        for at in 0..len {
            let value = value(&from[at]);
            a[at] = a[at] * 0.5 + value;
            b[at] = b[at] * 0.5 + value;
            c[at] = c[at] * 0.5 + value;
        }
    } else {
        let copy = &mut copy[..len];
        for at in 0..len {
            let value = value(&from[at]);
            a[at] = a[at] * 0.5 + value;
            b[at] = b[at] * 0.5 + value;
            c[at] = c[at] * 0.5 + value;
            copy[at] = (a[at].to_bits() >> 16) as u16;
        }
    }
}
