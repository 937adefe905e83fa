//! Predictors over one token, and the product that two of them use.

use std::hint::black_box;
use std::sync::Arc;

use gungraun::{library_benchmark, library_benchmark_group};
use hobbit_core::predict::{
    Gate, GateStack, Gates, Gating, PathLimits, PathPredictor, PathTableBuilder, Predicted, Predictor, Previous,
};
use hobbit_guard::inputs::{self, N_EXPERT, N_LAYERS, Token};

/// Width of the gating input.
const WIDTH: usize = 2048;
const N_GATES: u16 = 4;
/// Layers that the stacked gate predicts.
const N_LAYERS_AHEAD: u8 = 3;

fn gates(gating: Gating) -> (GateStack, Vec<f32>) {
    let mut gates = GateStack::default();
    for layer in 0..N_GATES {
        let rows = inputs::floats(WIDTH * usize::from(N_EXPERT), 10 + u32::from(layer));
        assert!(gates.add(
            layer,
            WIDTH,
            Gate { rows: Arc::new(rows), bias: None, choice_bias: None, gating, groups: None }
        ));
    }
    (gates, inputs::floats(WIDTH, 9))
}

// One input through three later layers' gates.
#[library_benchmark(setup = gates)]
#[bench::softmax(Gating::Softmax)]
#[bench::sigmoid(Gating::Sigmoid)]
fn product((mut gates, x): (GateStack, Vec<f32>)) -> (GateStack, Vec<f32>) {
    black_box(gates.scores_of(black_box(&[&x[..]]), &[1, 2, 3]));
    (gates, x)
}

/// A predictor that has seen a token, and the next one.
struct Warm {
    predictor: Box<dyn Predictor>,
    distance_max: u8,
    token: Token,
    out: Vec<Predicted>,
}

impl Warm {
    /// All layers, with the later routers' final scores as predicted ones.
    fn run(&mut self) {
        let Self { predictor, distance_max, token, out } = self;
        predictor.begin_token();
        for (at, choice) in token.iter().enumerate() {
            predictor.observe(choice.layer, &choice.chosen);
            for distance in 1..=*distance_max {
                let later = token.get(at + usize::from(distance)).filter(|_| predictor.needs_scores());
                if let Some(later) = later {
                    predictor.scores(choice.layer, distance, &later.scores);
                }
            }
            out.clear();
            (1..=*distance_max).for_each(|distance| predictor.predict(choice.layer, distance, out));
        }
    }
}

fn warm(predictor: Box<dyn Predictor>, distance_max: u8) -> Warm {
    let mut tokens = inputs::tokens(2, 4);
    let next = tokens.remove(1);
    let mut warm = Warm { predictor, distance_max, token: tokens.remove(0), out: Vec::new() };
    warm.run();
    warm.token = next;
    warm
}

fn stacked_gate() -> Warm {
    warm(Box::new(Gates::stacked(inputs::shape(), N_LAYERS_AHEAD)), N_LAYERS_AHEAD)
}

fn cross_layer() -> Warm {
    warm(Box::new(Gates::cross_layer(inputs::shape(), 1, Gates::PERCENTILE)), 1)
}

fn previous() -> Warm {
    warm(Box::new(Previous::new(inputs::shape())), 1)
}

/// Its table was made of other tokens of the same text.
fn path_table() -> Warm {
    let mut builder = PathTableBuilder::new(inputs::shape(), PathLimits::default());
    for token in inputs::tokens(66, 4).iter().skip(2) {
        builder.begin_token();
        token.iter().for_each(|choice| builder.observe(choice.layer, choice.chosen.iter().map(|(index, _)| *index)));
    }
    assert_eq!(builder.build().n_layers(), usize::from(N_LAYERS));
    warm(Box::new(PathPredictor::new(inputs::shape(), builder.build())), 1)
}

#[library_benchmark]
#[bench::stacked_gate(stacked_gate())]
#[bench::cross_layer(cross_layer())]
#[bench::path_table(path_table())]
#[bench::previous(previous())]
fn step(mut warm: Warm) -> Warm {
    black_box(&mut warm).run();
    warm
}

library_benchmark_group!(name = predict, benchmarks = [product, step]);
