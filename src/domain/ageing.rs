//! Priority ageing: one level up for every interval a job has waited.

/// The priority a lane competes with, 1 to 4.
///
/// * `age` - microseconds the head has waited; negative for a future time
/// * `step` - microseconds a level; 0 turns ageing off
pub fn effective_priority(priority: u8, age: i64, step: i64) -> u8 {
    if step <= 0 || age <= 0 {
        return priority;
    }
    let levels = (age / step).min(i64::from(priority.saturating_sub(1)));
    priority - levels as u8
}
