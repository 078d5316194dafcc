//! A run that goes on takes no more memory.

mod common;

use burn::tensor::FloatDType;
use common::{LR, Odd, adamw, config, rows, with_engines};
use zero_burn::{Bytes, DType, Precision, Stage, ZeroConfig};

/// Steps until every buffer has been needed at once with every other that can be.
const WARM_UP: usize = 20;
const STEPS: usize = 1000;

#[test]
fn a_thousand_steps_allocate_no_buffer() {
    for stage in Stage::ALL {
        // With every amount of look-ahead: none, some, all. Only stage 3 has any.
        for (compute, lookahead) in [(DType::F32, 0), (DType::F32, 130), (DType::BF16, 1 << 20)] {
            let precision = Precision { compute, ..Precision::default() };
            let lookahead_bytes = Bytes::new(if stage == Stage::Three { lookahead } else { 0 });
            let config = ZeroConfig { precision, lookahead_bytes, ..config(stage) };
            let grown = with_engines(&config, 2, |_, zero| {
                let mut model = zero.shard(Odd::new)?;
                let mut optimizer = zero.optimizer(adamw().build())?;
                let mut memory = Vec::new();
                for step in 0..WARM_UP + STEPS {
                    let rows = rows(step % 7, 0..4, zero.device());
                    let rows = if compute == DType::BF16 { rows.cast(FloatDType::BF16) } else { rows };
                    zero.backward(model.loss(rows, 0))?;
                    let outcome = optimizer.step(LR, &mut model)?;
                    if step + 1 == WARM_UP || step + 1 == WARM_UP + STEPS {
                        memory.push((outcome.memory.allocations, outcome.memory.state));
                    }
                }
                Ok(memory)
            });
            for memory in grown {
                assert_eq!(memory[0], memory[1], "{stage}, {compute}, look-ahead of {lookahead_bytes}");
            }
        }
    }
}
