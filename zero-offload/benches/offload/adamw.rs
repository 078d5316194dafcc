//! The steps that are measured, and AdamW by this crate.

use std::error::Error;
use std::time::Instant;

use half::bf16;
use zero_offload::{
    Adam, Floats, FloatsMut, HostBuffer, HostOptimizer, HostPool, Update, Workers, sum_of_squares,
};

const SCALE: f64 = 1024.0;
const CLIP: f64 = 1.0;

/// What is done with the gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Task {
    pub(crate) name: &'static str,
    /// Whether the gradient is bf16 and not f32.
    pub(crate) half_gradient: bool,
    /// Whether the new parameters are copied to bf16.
    pub(crate) copy: bool,
    /// Whether the gradient is unscaled and clipped by its norm.
    pub(crate) whole: bool,
}

impl Task {
    pub(crate) const ALL: [Self; 4] = [
        Self { name: "f32", half_gradient: false, copy: false, whole: false },
        Self { name: "bf16", half_gradient: true, copy: true, whole: false },
        Self { name: "whole-f32", half_gradient: false, copy: true, whole: true },
        Self { name: "whole-bf16", half_gradient: true, copy: true, whole: true },
    ];

    /// Bytes that an element's update has to read and write.
    pub(crate) const fn bytes(self) -> usize {
        let gradient = if self.half_gradient { 2 } else { 4 };
        let reads = if self.whole { 2 } else { 1 };
        reads * gradient + 6 * 4 + if self.copy { 2 } else { 0 }
    }
}

/// Everything that is updated, and what it is updated with.
pub(crate) struct AdamW {
    workers: Workers,
    optimizer: HostOptimizer,
    step: u64,
    parameters: HostBuffer,
    states: [HostBuffer; 2],
    single: HostBuffer,
    half: HostBuffer,
    copy: HostBuffer,
}

impl AdamW {
    pub(crate) fn new(elements: usize) -> Result<Self, Box<dyn Error>> {
        let pool = HostPool::default();
        let singles = |scale: f32| {
            let mut buffer = pool.take(4 * elements);
            for (at, value) in buffer.as_mut_slice::<f32>().iter_mut().enumerate() {
                *value = scale * ((at * 7919 % 2001) as f32 / 1000.0 - 1.0);
            }
            buffer
        };
        let mut half = pool.take(2 * elements);
        for (at, value) in half.as_mut_slice::<bf16>().iter_mut().enumerate() {
            *value = bf16::from_f32((at * 7919 % 2001) as f32 - 1000.0);
        }
        let mut copy = pool.take(2 * elements);
        copy.fill(1);
        Ok(Self {
            workers: Workers::for_process()?,
            optimizer: HostOptimizer::new(Adam::ADAMW)?,
            step: 0,
            parameters: singles(1.0),
            states: [singles(0.0), singles(0.0)],
            single: singles(SCALE as f32),
            half,
            copy,
        })
    }

    pub(crate) fn workers(&self) -> &Workers {
        &self.workers
    }

    /// Seconds of a step.
    pub(crate) fn seconds(&mut self, task: Task) -> Result<f64, Box<dyn Error>> {
        self.update(task)?;
        let start = Instant::now();
        for _ in 0..2 {
            self.update(task)?;
        }
        Ok(start.elapsed().as_secs_f64() / 2.0)
    }

    fn update(&mut self, task: Task) -> Result<(), Box<dyn Error>> {
        self.step += 1;
        let gradient = match task.half_gradient {
            true => Floats::Bf16(self.half.as_slice()),
            false => Floats::F32(self.single.as_slice()),
        };
        let mut gradient_factor = 1.0;
        if task.whole {
            let found = sum_of_squares(&self.workers, gradient);
            if let Some(at) = found.first_non_finite {
                return Err(format!("gradient {at} is not finite").into());
            }
            gradient_factor = 1.0 / (SCALE * (found.sum.sqrt() / SCALE / CLIP).max(1.0));
        }
        let [first, second] = &mut self.states;
        self.optimizer.update(
            &self.workers,
            Update { lr: 1e-3, step: self.step, gradient_factor },
            self.parameters.as_mut_slice(),
            gradient,
            &mut [FloatsMut::F32(first.as_mut_slice()), FloatsMut::F32(second.as_mut_slice())],
            task.copy.then(|| FloatsMut::Bf16(self.copy.as_mut_slice())),
        )?;
        Ok(())
    }
}
