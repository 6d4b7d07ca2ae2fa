//! Storage that is used again, of things that stay on their thread.

/// The allocation of a vector that is empty between two uses. Slices of shared memory are not `Send`; what keeps a list
/// of them only for its storage may still go to another thread.
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
    /// An empty vector, with the storage if it was put back.
    pub fn take(&mut self) -> Vec<T> {
        std::mem::take(&mut self.0)
    }

    /// Keeps the storage of a vector; what is in it is dropped.
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
