//! The pure part of the extension, tested without a server.

#[allow(dead_code)]
#[path = "../src/domain/mod.rs"]
mod domain;

#[path = "domain/check.rs"]
mod check;
#[path = "domain/claiming.rs"]
mod claiming;
#[path = "domain/closing.rs"]
mod closing;
#[path = "domain/memory.rs"]
mod memory;
#[path = "domain/model.rs"]
mod model;
#[path = "domain/passes.rs"]
mod passes;
#[path = "domain/producing.rs"]
mod producing;
#[path = "domain/rebuild.rs"]
mod rebuild;
#[path = "domain/runtimes.rs"]
mod runtimes;
#[path = "domain/transactions.rs"]
mod transactions;
#[path = "domain/truth.rs"]
mod truth;
#[path = "domain/turns.rs"]
mod turns;
#[path = "domain/units.rs"]
mod units;
#[path = "domain/waits.rs"]
mod waits;
#[path = "domain/wheel.rs"]
mod wheel;
#[path = "domain/withdrawing.rs"]
mod withdrawing;
#[path = "domain/world.rs"]
mod world;
