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
        let outcome = engine.backward(&loss, true).and_then(|()| {
            let norm = engine.grad_norm()?;
            engine.step(1e-6)?;
            Ok((norm, before - flat(&p)[0]))
        });
        (outcome, loss, x)
    };
    let ordinary = std::thread::Builder::new().stack_size(2 << 20).spawn(train).unwrap();
    let (outcome, loss, x) = ordinary.join().unwrap();
    // Dropping a graph recurses too, in candle: that is left to a thread with room for it.
    let roomy = std::thread::Builder::new()
        .stack_size(512 << 20)
        .spawn(move || drop((loss, x)));
    roomy.unwrap().join().unwrap();
    let (norm, moved) = outcome.unwrap();
    assert_eq!(norm, (NODES + 1) as f64);
    assert!((moved - 0.050_001).abs() < 1e-6, "{moved}");
}
