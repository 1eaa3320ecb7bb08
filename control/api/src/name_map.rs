//! Objects by name, in a form that is cheap to copy: a copy shares everything, and a change copies a few neighbours.
//!
//! The agent's rooms hold the desired state while they work, and the next delta must neither wait for them nor copy a
//! cluster's services.

use std::sync::Arc;

use crate::desired::Name;

/// Objects of one piece. A change copies at most one piece, a lookup searches one.
const PIECE: usize = 64;

type Piece<V> = Vec<(Name, V)>;

/// An ordered map from [`Name`]. Pieces are sorted, none is empty, and all of a piece comes before the next.
#[derive(Clone)]
pub struct NameMap<V> {
    pieces: Vec<Arc<Piece<V>>>,
    len: usize,
}

impl<V> Default for NameMap<V> {
    fn default() -> Self {
        Self {
            pieces: Vec::new(),
            len: 0,
        }
    }
}

impl<V: std::fmt::Debug> std::fmt::Debug for NameMap<V> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

impl<V: PartialEq> PartialEq for NameMap<V> {
    fn eq(&self, other: &Self) -> bool {
        self.len == other.len && self.iter().eq(other.iter())
    }
}

impl<V> NameMap<V> {
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    #[must_use]
    pub fn get(&self, name: &Name) -> Option<&V> {
        let piece = self.pieces.get(self.piece_of(name)?)?;
        let place = piece.binary_search_by(|(own, _)| own.cmp(name)).ok()?;
        piece.get(place).map(|(_, value)| value)
    }

    #[must_use]
    pub fn contains_key(&self, name: &Name) -> bool {
        self.get(name).is_some()
    }

    /// In the order of names.
    pub fn iter(&self) -> impl Iterator<Item = (&Name, &V)> {
        self.pieces
            .iter()
            .flat_map(|piece| piece.iter().map(|(name, value)| (name, value)))
    }

    pub fn keys(&self) -> impl Iterator<Item = &Name> {
        self.iter().map(|(name, _)| name)
    }

    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.iter().map(|(_, value)| value)
    }

    /// The last piece that starts at or before the name, else the first; none when there are no pieces.
    fn piece_of(&self, name: &Name) -> Option<usize> {
        let after = self
            .pieces
            .partition_point(|piece| piece.first().is_some_and(|(first, _)| first <= name));
        (!self.pieces.is_empty()).then(|| after.saturating_sub(1))
    }
}

impl<V: Clone> NameMap<V> {
    /// Puts a value in and returns the one that it replaces.
    pub fn insert(&mut self, name: Name, value: V) -> Option<V> {
        let Some(index) = self.piece_of(&name) else {
            self.pieces.push(Arc::new(vec![(name, value)]));
            self.len = 1;
            return None;
        };
        let piece = Arc::make_mut(&mut self.pieces[index]);
        let place = match piece.binary_search_by(|(own, _)| own.cmp(&name)) {
            Ok(place) => return Some(std::mem::replace(&mut piece[place].1, value)),
            Err(place) => place,
        };
        self.len += 1;
        if piece.len() < PIECE {
            piece.insert(place, (name, value));
            return None;
        }
        // Objects often come in order: then pieces are left full.
        let at = if place == PIECE { PIECE } else { PIECE / 2 };
        let mut second = Vec::with_capacity(PIECE);
        second.extend(piece.drain(at..));
        if place < at {
            piece.insert(place, (name, value));
        } else {
            second.insert(place - at, (name, value));
        }
        self.pieces.insert(index + 1, Arc::new(second));
        None
    }

    /// Takes a value out.
    pub fn remove(&mut self, name: &Name) -> Option<V> {
        let index = self.piece_of(name)?;
        let place = self.pieces[index]
            .binary_search_by(|(own, _)| own.cmp(name))
            .ok()?;
        let piece = Arc::make_mut(&mut self.pieces[index]);
        let (_, value) = piece.remove(place);
        if piece.is_empty() {
            self.pieces.remove(index);
        }
        self.len -= 1;
        Some(value)
    }

    #[must_use]
    pub fn get_mut(&mut self, name: &Name) -> Option<&mut V> {
        let index = self.piece_of(name)?;
        let place = self.pieces[index]
            .binary_search_by(|(own, _)| own.cmp(name))
            .ok()?;
        let piece = Arc::make_mut(&mut self.pieces[index]);
        piece.get_mut(place).map(|(_, value)| value)
    }

    /// Copies every piece that is shared.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut V> {
        self.pieces
            .iter_mut()
            .flat_map(|piece| Arc::make_mut(piece).iter_mut().map(|(_, value)| value))
    }
}

impl<V: Clone> Extend<(Name, V)> for NameMap<V> {
    fn extend<I: IntoIterator<Item = (Name, V)>>(&mut self, items: I) {
        for (name, value) in items {
            self.insert(name, value);
        }
    }
}

impl<V: Clone> FromIterator<(Name, V)> for NameMap<V> {
    fn from_iter<I: IntoIterator<Item = (Name, V)>>(items: I) -> Self {
        let mut map = Self::default();
        map.extend(items);
        map
    }
}

impl<V> std::ops::Index<&Name> for NameMap<V> {
    type Output = V;

    /// # Panics
    /// When there is no such name.
    fn index(&self, name: &Name) -> &V {
        match self.get(name) {
            Some(value) => value,
            None => panic!("no entry {name}"),
        }
    }
}

impl<'a, V> IntoIterator for &'a NameMap<V> {
    type Item = (&'a Name, &'a V);
    type IntoIter = Box<dyn Iterator<Item = Self::Item> + 'a>;

    fn into_iter(self) -> Self::IntoIter {
        Box::new(self.iter())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn name(number: u32) -> Name {
        Name::new(format!("ns-{}", number % 3), format!("object-{number}"))
    }

    /// Numbers that look random and are the same in every run.
    fn numbers(count: u32) -> impl Iterator<Item = u32> {
        (0..count).map(|i| i.wrapping_mul(2_654_435_761).rotate_left(7) % 500)
    }

    #[test]
    fn it_is_the_map_that_it_looks_like() {
        let mut model = BTreeMap::new();
        let mut map = NameMap::default();
        for (step, number) in numbers(4_000).enumerate() {
            let key = name(number);
            if number % 3 == 0 {
                assert_eq!(map.remove(&key), model.remove(&key));
            } else {
                assert_eq!(
                    map.insert(key.clone(), step),
                    model.insert(key.clone(), step)
                );
            }
            assert_eq!(map.get(&key), model.get(&key));
            assert_eq!(map.len(), model.len());
        }
        assert!(map.iter().eq(model.iter()));
        assert!(
            map.pieces
                .iter()
                .all(|piece| (1..=PIECE).contains(&piece.len()))
        );
        for number in 0..500 {
            assert_eq!(map.remove(&name(number)), model.remove(&name(number)));
        }
        assert!(map.is_empty() && map.pieces.is_empty());
    }

    #[test]
    fn a_copy_does_not_see_later_changes_and_shares_the_rest() {
        let mut map: NameMap<u32> = (0..1_000).map(|number| (name(number), number)).collect();
        let before = map.clone();
        map.insert(name(7), 70);
        map.remove(&name(8));
        assert_eq!(before[&name(7)], 7);
        assert_eq!(before.get(&name(8)), Some(&8));
        let shared = map
            .pieces
            .iter()
            .filter(|piece| Arc::strong_count(piece) == 2)
            .count();
        assert!(shared + 2 >= before.pieces.len());
    }
}
