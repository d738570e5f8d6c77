use super::*;
use crate::spec::{Fsync, Medium};

fn spec(under: &str, tiers: Vec<TierSpec>) -> Spec {
    Spec {
        under: PathBuf::from(under),
        tiers,
        fsync: Fsync::Drain,
        close_drains: true,
        drain_threads: 1,
        per_user: None,
        host_free: 0,
        kernel_gathers: false,
        device: None,
        partner: None,
    }
}

fn own(name: &str) -> Spec {
    let under = format!("/nowhere/{name}-{}", std::process::id());
    spec(&under, vec![TierSpec::ram(8 << 20)])
}

#[test]
fn a_damaged_description_is_told_and_nothing_is_removed() {
    let spec = own("damaged");
    let home = memory_home(&spec.under);
    save(&spec).expect("a home");
    assert_eq!(saved(&spec.under, &[]).expect("sound"), Some(spec.clone()));
    fs::create_dir(home.join(TIER)).expect("a tier");
    for text in [&b""[..], b"{\"under\": \"/x\"", b"\xff"] {
        fs::write(home.join(SPEC), text).expect("a file");
        assert!(matches!(saved(&spec.under, &[]), Err(CacheError::Damaged { .. })));
    }
    fs::remove_file(home.join(SPEC)).expect("a file");
    assert!(saved(&spec.under, &[]).is_err(), "there is a tier");
    // A cache that is started with other tiers takes the one in memory over.
    let disk = TierSpec { medium: Medium::Nvme, folder: "/disk".into(), bytes: 8 << 20 };
    let started = with_left_tiers(Spec { tiers: vec![disk.clone()], ..spec.clone() });
    assert_eq!(started.expect("tiers").tiers, [disk, TierSpec::ram(0)]);
    remove(&spec);
    assert!(!home.exists());
    assert_eq!(saved(&spec.under, &[]).expect("nothing"), None);
}

#[test]
fn more_tiers_than_there_can_be_are_refused() {
    let before = own("tiers");
    save(&before).expect("a home");
    let folder = |n: usize| PathBuf::from(format!("/disk{n}"));
    let disk = |n| TierSpec { medium: Medium::Nvme, folder: folder(n), bytes: 8 << 20 };
    let asked = Spec { tiers: (0..4).map(disk).collect(), ..before.clone() };
    let refused = with_left_tiers(asked).expect_err("five tiers").to_string();
    assert!(refused.contains("at most"), "{refused}");
    remove(&before);
}

#[test]
fn a_home_has_one_owner_also_while_it_is_removed() {
    let spec = own("locks");
    let home = memory_home(&spec.under);
    let first = take(&home, &spec.under).expect("free");
    assert!(matches!(take(&home, &spec.under), Err(CacheError::Busy(_))));
    remove(&spec);
    assert!(!home.exists());
    // The daemon before has not ended, but what it had is gone.
    let second = take(&home, &spec.under).expect("a new home");
    assert!(matches!(take(&home, &spec.under), Err(CacheError::Busy(_))));
    drop((first, second));
    remove(&spec);
}

#[test]
fn a_lock_that_was_removed_is_nobodys() {
    let spec = own("race");
    let home = memory_home(&spec.under);
    let owned = std::sync::atomic::AtomicBool::new(false);
    let order = std::sync::atomic::Ordering::SeqCst;
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..2000 {
                    let Ok(lock) = take(&home, &spec.under) else { continue };
                    assert!(!owned.swap(true, order), "it has two owners");
                    std::thread::yield_now();
                    owned.store(false, order);
                    remove(&spec);
                    drop(lock);
                }
            });
        }
    });
    remove(&spec);
}

#[test]
fn a_disk_that_is_named_is_looked_at_beside_what_the_last_daemon_had() {
    let own = own("named");
    let disk = std::env::temp_dir().join(format!("kedge-cache-named-{}", std::process::id()));
    fs::create_dir_all(home_in(&disk, &own.under).join(TIER)).expect("a tier");
    let empty = PathBuf::from("/disk");
    let found = with_disks(own.clone(), &[disk.clone(), empty]).expect("tiers");
    assert_eq!(found.tiers, [own.tiers[0].clone(), TierSpec::nvme(disk.clone(), 0)]);
    fs::remove_dir_all(disk).expect("a folder");
}
