//! Reuse of the storage of a vector whose elements must stay on their thread.
//!
//! An owner keeps a [`Spare`] for its lifetime, takes the vector out at the start of a burst, fills it, and puts it
//! back empty at the end.

/// The storage of a vector that is empty between two uses. It is `Send` even if `T` is not: slices of shared
/// memory are not, but the owner of a list that is kept only for its storage may move to another thread.
#[derive(Debug)]
pub struct Spare<T>(Vec<T>);

// SAFETY: the vector is always empty, so there is no `T` that another thread could get at; its storage comes from the global
// allocator, which any thread may give it back to.
unsafe impl<T> Send for Spare<T> {}

impl<T> Default for Spare<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> Spare<T> {
    /// Takes an empty vector out, with the storage that was put back last, if any.
    pub fn take(&mut self) -> Vec<T> {
        std::mem::take(&mut self.0)
    }

    /// Drops the elements of a vector and keeps its storage.
    pub fn put(&mut self, mut vector: Vec<T>) {
        vector.clear();
        self.0 = vector;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn storage_comes_back_empty() {
        let mut spare = Spare::default();
        let mut list = spare.take();
        list.extend([1, 2, 3]);
        let capacity = list.capacity();
        spare.put(list);
        let list = spare.take();
        assert_eq!((list.len(), list.capacity()), (0, capacity));
        assert_eq!(spare.take().capacity(), 0);
    }
}
