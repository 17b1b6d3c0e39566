//! Deep graphs: candle's backward recurses, and the engine gives it room.

use super::{engine, flat, parameters, sgd};
use sconce_zero::EngineOptions;

#[test]
fn a_graph_of_fifty_thousand_nodes_does_not_overflow_an_ordinary_stack() {
    const NODES: usize = 50_000;
    let train = || {
        let engine = engine(&sconce_collectives::single(), EngineOptions::default());
        let [p] = parameters(&engine, [("p", 1)]);
        engine.set_optimizer(sgd()).unwrap();
        let before = flat(&p)[0];
        let mut x = p.clone();
        for _ in 0..NODES {
            x = (&x + &p).unwrap();
        }
        let loss = x.sum_all().unwrap();
        engine.backward(&loss, true).unwrap();
        assert_eq!(engine.grad_norm().unwrap(), (NODES + 1) as f64);
        engine.step(1e-6).unwrap();
        assert!((before - flat(&p)[0] - 0.050_001).abs() < 1e-6);
        // Dropping the graph recurses too, in candle: leave that to a thread with room for it.
        loss
    };
    let loss = std::thread::Builder::new()
        .stack_size(2 << 20)
        .spawn(train)
        .unwrap()
        .join()
        .unwrap();
    std::thread::Builder::new()
        .stack_size(512 << 20)
        .spawn(move || drop(loss))
        .unwrap()
        .join()
        .unwrap();
}
