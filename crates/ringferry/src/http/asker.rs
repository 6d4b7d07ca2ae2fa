//! Asks the switch on behalf of everybody who wants the same: the answer to a question is passed on for [`FRESH`], and to all that ask meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use ringferry_sys::eventfd::EventFd;

/// For so long an answer of the switch is passed on to whoever asks.
const FRESH: Duration = Duration::from_millis(250);
/// For so many times as long as the switch took to answer it is not asked again: who asks another question each time has it work a fifth of its time at most.
const PAUSE: u32 = 4;
/// But for no longer than this: whoever looks waits for it.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// Most answers that are kept, and questions that wait for the one before. Those that are too many are asked when there is room again.
const MOST: usize = 32;

/// The answers that there are, with the time at which they came, and the questions that wait for one.
struct Known<Q, A> {
    answers: BTreeMap<Q, (Instant, A)>,
    asked: BTreeSet<Q>,
}

/// The thread that asks, which may take as long as a switch that is stopped.
pub struct Asker<Q, A> {
    questions: SyncSender<Q>,
    known: Arc<Mutex<Known<Q, A>>>,
    answered: Arc<EventFd>,
}

impl<Q: Clone + Ord + Send + 'static, A: Clone + Send + 'static> Asker<Q, A> {
    /// Starts the thread, which answers questions with `ask`.
    ///
    /// # Errors
    /// The system has no descriptors or threads left.
    pub fn start(ask: impl Fn(&Q) -> A + Send + 'static) -> io::Result<Asker<Q, A>> {
        let (questions, asked): (_, Receiver<Q>) = sync_channel(MOST);
        let known = Arc::new(Mutex::new(Known { answers: BTreeMap::new(), asked: BTreeSet::new() }));
        let asker = Asker { questions, known, answered: Arc::new(EventFd::new()?) };
        let (known, answered) = (Arc::clone(&asker.known), Arc::clone(&asker.answered));
        thread::Builder::new().name("ask".to_owned()).spawn(move || {
            while let Ok(question) = asked.recv() {
                let begun = Instant::now();
                let answer = ask(&question);
                let took = begun.elapsed();
                if let Ok(mut known) = known.lock() {
                    known.asked.remove(&question);
                    known.answers.insert(question, (Instant::now(), answer));
                    known.forget();
                }
                // Its counter is far from full: it is emptied each time.
                let _ = answered.signal();
                thread::sleep((took * PAUSE).min(LONGEST_PAUSE));
            }
        })?;
        Ok(asker)
    }

    /// What there is, if it is fresh; otherwise the switch is asked, and the eventfd says when it has answered.
    pub fn get(&self, question: &Q, since: Instant) -> Option<A> {
        let mut known = self.known.lock().ok()?;
        match known.answers.get(question) {
            // An answer to a question that was asked before this one came is as good.
            Some((when, answer)) if *when >= since || when.elapsed() < FRESH => Some(answer.clone()),
            _ => {
                if !known.asked.contains(question) && self.questions.try_send(question.clone()).is_ok() {
                    known.asked.insert(question.clone());
                }
                None
            }
        }
    }

    /// Readable when something has been answered.
    pub fn answered(&self) -> &Arc<EventFd> {
        &self.answered
    }
}

impl<Q: Clone + Ord, A> Known<Q, A> {
    /// Forgets the oldest answer if there are too many.
    fn forget(&mut self) {
        let oldest =
            self.answers.iter().min_by_key(|(_, (when, _))| *when).map(|(question, _)| question.clone());
        if let Some(oldest) = oldest.filter(|_| self.answers.len() > MOST) {
            self.answers.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn a_question_is_asked_once_for_all_and_answers_are_bounded() {
        let count = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&count);
        let asker = Asker::start(move |question: &usize| {
            counted.fetch_add(1, Ordering::Relaxed);
            question * 2
        })
        .unwrap();
        let now = Instant::now();
        let wait = |question| loop {
            if let Some(answer) = asker.get(&question, now) {
                return answer;
            }
            thread::yield_now();
        };
        assert_eq!((wait(21), wait(21), count.load(Ordering::Relaxed)), (42, 42, 1));
        (0..3 * MOST).for_each(|question| assert_eq!(wait(question), 2 * question));
        assert_eq!(asker.known.lock().unwrap().answers.len(), MOST);
        assert!(asker.known.lock().unwrap().asked.is_empty());
    }
}
